"""Coresets, synaptic intelligence, quadratic penalties and metrics, against loops by hand."""

import copy
import functools
import io
import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tyxe
from tyxe import continual, plotting
from tyxe.continual import GaussianPenalty, SynapticIntelligence
from tyxe.errors import TyxeWarning

N = 8

# --------------------------------------------------------------------------- coresets


@pytest.mark.parametrize("method", continual.CORESETS)
@given(n=st.integers(2, 12), size=st.integers(1, 11), seed=st.integers(0, 5))
def test_a_coreset_and_the_rest_are_all_points_once(method, n, size, seed):
    size = min(size, n - 1)
    torch.manual_seed(seed)
    x = torch.randint(3, (n, 2)).float()  # with points that coincide
    y = torch.arange(n)
    indices = continual.coreset_indices(x, size, method)
    coreset, rest = continual.split_coreset((x, y), indices)
    assert len(coreset[1]) == size
    assert sorted([*coreset[1].tolist(), *rest[1].tolist()]) == list(range(n))
    assert rest[1].tolist() == sorted(rest[1].tolist())
    for inputs, targets in (coreset, rest):
        assert torch.equal(inputs, x[targets])


def covering_radius(x, indices):
    return torch.cdist(x, x[list(indices)]).amin(-1).max().item()


@pytest.mark.parametrize("seed", range(5))
def test_k_center_is_greedy_and_within_twice_the_best(seed):
    torch.manual_seed(seed)
    x = torch.randn(9, 2, dtype=torch.double)
    chosen = continual.k_center(x, 3).tolist()
    for count in (1, 2):
        distances = torch.cdist(x, x[chosen[:count]]).amin(-1)
        assert chosen[count] == int(distances.argmax())
    best = min(covering_radius(x, some) for some in itertools.combinations(range(9), 3))
    assert best <= covering_radius(x, chosen) <= 2 * best


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_k_center_takes_images_of_bytes_and_numbers(dtype):
    images = torch.randint(0, 256, (10, 1, 4, 4), dtype=torch.uint8).to(dtype)
    numbers = torch.randint(0, 256, (10,), dtype=torch.uint8).to(dtype)
    for points in (images, numbers):
        torch.manual_seed(0)
        expected = continual.k_center(points.double().reshape(10, -1), 4)
        torch.manual_seed(0)
        assert torch.equal(continual.k_center(points, 4), expected)


def test_a_coreset_follows_the_seed():
    x = torch.randn(30, 2)
    for method in continual.CORESETS:
        picks = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            picks.append(continual.coreset_indices(x, 5, method).tolist())
        assert picks[0] == picks[1] != picks[2]


@pytest.mark.parametrize(
    ("size", "method", "message"),
    [
        (6, "random", "size is 6, but the task has 6 points"),
        (7, "k-center", "size is 7, but the task has 6 points"),
        (0, "random", "size is 0"),
        (2, "k-means", "method is 'k-means'; expected 'random' or 'k-center'"),
    ],
)
def test_wrong_coresets(size, method, message):
    with pytest.raises(ValueError, match=message):
        continual.coreset_indices(torch.randn(6, 2), size, method)


# --------------------------------------------------------------------------- penalties


def test_the_penalty_is_a_normals_log_density():
    torch.manual_seed(0)
    means, values = ({n: torch.randn(s) for n, s in (("a", (2, 3)), ("b", (3,)))} for _ in "12")
    precisions = {name: mean.exp() for name, mean in means.items()}
    penalty = GaussianPenalty(means, precisions)
    normals = {n: dist.Normal(m, precisions[n].rsqrt()) for n, m in means.items()}
    gap = [normals[n].log_prob(m) - normals[n].log_prob(values[n]) for n, m in means.items()]
    torch.testing.assert_close(penalty(values), sum(g.sum() for g in gap))
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    gradients = torch.autograd.grad(penalty(leaves), list(leaves.values()))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        torch.testing.assert_close(penalty.gradient(name, leaf), gradient)


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(1)}, "expected equal"),
        ({"a": torch.ones(1)}, "expected equal"),
        ({"a": torch.tensor([1.0, -1.0])}, "precision of 'a' is negative"),
    ],
)
def test_wrong_penalties(precisions, message):
    with pytest.raises(ValueError, match=message):
        GaussianPenalty({"a": torch.zeros(2)}, precisions)


# --------------------------------------------------------------------------- intelligence


def regression(seed=0):
    """A net, and data of two tasks, in double precision."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    tasks = [
        (torch.randn(N, 3, dtype=torch.double), torch.randn(N, 1, dtype=torch.double))
        for _ in range(2)
    ]
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    return tyxe.VariationalBNN(net, prior, likelihood), net, tasks


OPTIMISERS = {
    "gradient descent": functools.partial(torch.optim.SGD, lr=0.05),
    "Nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.05),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_intelligence_is_the_published_loop(optimiser):
    """Every step by hand: loss and penalty differentiated together, omega from the loss alone."""
    bnn, net, tasks = regression()
    c, xi, steps = 0.7, 0.05, 6
    intelligence = SynapticIntelligence(bnn, c, xi)
    for x, y in tasks:
        optimizer = intelligence.watch(optimiser(bnn.parameters()))
        bnn.fit([(x, y)], optimizer, steps, progress=False)
        intelligence.update()

    weights = list(net.parameters())
    importance = [torch.zeros_like(w) for w in weights]
    reference = [w.detach().clone() for w in weights]
    for x, y in tasks:
        first = [w.detach().clone() for w in weights]
        omega = [torch.zeros_like(w) for w in weights]
        optimizer = optimiser(weights)
        for _ in range(steps):
            # The mean negative log-likelihood of a Normal of unit variance.
            loss = (net(x) - y).square().sum() / 2 / N
            gradients = torch.autograd.grad(loss, weights)
            optimizer.zero_grad()
            penalty = sum(
                (i * (w - r).square()).sum()
                for i, w, r in zip(importance, weights, reference, strict=True)
            )
            ((net(x) - y).square().sum() / 2 / N + c * penalty).backward()
            before = [w.detach().clone() for w in weights]
            optimizer.step()
            for o, g, w, b in zip(omega, gradients, weights, before, strict=True):
                o -= g * (w.detach() - b)
        for i, o, w, f in zip(importance, omega, weights, first, strict=True):
            i += o.clamp(min=0) / ((w.detach() - f).square() + xi)
        reference = [w.detach().clone() for w in weights]

    found = intelligence.penalty
    for (name, mean), w, i in zip(found.means.items(), weights, importance, strict=True):
        torch.testing.assert_close(dict(bnn.named_parameters())[name], w)
        torch.testing.assert_close(mean, w.detach())
        torch.testing.assert_close(found.precisions[name], 2 * c * i)


def test_omega_is_what_the_steps_took_off_the_loss():
    """The sum over weights is a Riemann sum of the loss's line integral: exact for small steps."""
    bnn, _, (task, _) = regression()

    def loss():
        return (bnn.net(task[0]) - task[1]).square().sum().item() / 2 / N

    gaps = []
    for steps in (100, 200):
        start = copy.deepcopy(bnn.state_dict())
        intelligence, before = SynapticIntelligence(bnn), loss()
        sgd = torch.optim.SGD(bnn.parameters(), lr=1.0 / steps)
        bnn.fit([task], intelligence.watch(sgd), steps, progress=False)
        omega = sum(o.sum().item() for o in intelligence.state_dict()["omega"].values())
        gaps.append(omega - (before - loss()))
        bnn.load_state_dict(start)
    # The left-point rule's error is first order in the step.
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.1)


def test_intelligence_leaves_heads_alone_and_resumes():
    bnn, _, tasks = regression()
    heads = continual.Heads(bnn, ["2"])
    intelligence = SynapticIntelligence(bnn, heads=heads)
    assert set(intelligence.penalty.means) == {"net.0.weight", "net.0.bias"}
    heads.start(0)
    sgd = OPTIMISERS["Nesterov"](bnn.parameters())
    bnn.fit([tasks[0]], intelligence.watch(sgd), 3, progress=False)
    intelligence.update()
    torch.save(
        {"bnn": bnn.state_dict(), "intelligence": intelligence.state_dict()}, file := io.BytesIO()
    )
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, _, _ = regression(seed=1)
    resumed = SynapticIntelligence(other, heads=continual.Heads(other, ["2"]))
    other.load_state_dict(state["bnn"])
    resumed.load_state_dict(state["intelligence"])
    for part, net in ((intelligence, bnn), (resumed, other)):
        sgd = OPTIMISERS["Nesterov"](net.parameters())
        net.fit([tasks[1]], part.watch(sgd), 3, progress=False)
        part.update()
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other.state_dict()[name])
    for name, value in intelligence.penalty.precisions.items():
        assert torch.equal(value, resumed.penalty.precisions[name])


def test_one_optimiser_for_all_tasks_holds_as_one_for_each():
    found = []
    for again in (True, False):
        bnn, _, tasks = regression()
        intelligence = SynapticIntelligence(bnn, c=5.0)

        def watched(bnn=bnn, intelligence=intelligence):
            return intelligence.watch(OPTIMISERS["gradient descent"](bnn.parameters()))

        sgd = watched()
        for task in tasks:
            bnn.fit([task], sgd, 10, progress=False)
            intelligence.update()
            sgd = watched() if again else sgd
        found.append(bnn.state_dict()["net.0.weight"])
    assert torch.equal(*found)


def test_an_optimiser_that_is_watched_stays_so_after_loading():
    bnn, _, tasks = regression()
    intelligence = SynapticIntelligence(bnn, c=5.0)
    sgd = intelligence.watch(OPTIMISERS["gradient descent"](bnn.parameters()))
    bnn.fit([tasks[0]], sgd, 5, progress=False)
    intelligence.update()
    other, _, _ = regression()
    loaded = SynapticIntelligence(other, c=5.0)
    early = loaded.watch(OPTIMISERS["gradient descent"](other.parameters()))
    other.load_state_dict(bnn.state_dict())
    loaded.load_state_dict(intelligence.state_dict())
    late = intelligence.watch(OPTIMISERS["gradient descent"](bnn.parameters()))
    bnn.fit([tasks[1]], late, 5, progress=False)
    other.fit([tasks[1]], early, 5, progress=False)
    assert torch.equal(bnn.state_dict()["net.0.weight"], other.state_dict()["net.0.weight"])


def test_intelligence_is_loaded_in_the_parameters_own_type():
    bnn, _, _ = regression()
    state = SynapticIntelligence(bnn).state_dict()
    state = {part: {n: v.float() for n, v in values.items()} for part, values in state.items()}
    intelligence = SynapticIntelligence(bnn)
    intelligence.load_state_dict(state)
    for values in intelligence.state_dict().values():
        assert all(value.dtype == torch.double for value in values.values())


def test_an_update_without_steps_warns():
    bnn, _, tasks = regression()
    intelligence = SynapticIntelligence(bnn)
    bnn.fit([tasks[0]], OPTIMISERS["Adam"], 2, progress=False)  # which nobody watches
    with pytest.warns(TyxeWarning, match=r"no step of a watched optimiser.*watch\(optimizer\)"):
        intelligence.update()


def test_wrong_intelligence():
    bnn, _, _ = regression()
    for options in ({"c": 0.0}, {"xi": -1.0}):
        with pytest.raises(ValueError, match="expected positive numbers"):
            SynapticIntelligence(bnn, **options)
    intelligence = SynapticIntelligence(bnn)
    sgd = intelligence.watch(torch.optim.SGD(bnn.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="watched already"):
        intelligence.watch(sgd)
    other = SynapticIntelligence(bnn, heads=continual.Heads(bnn, ["2"]))
    with pytest.raises(ValueError, match=r"here there are net\.0\.weight"):
        other.load_state_dict(intelligence.state_dict())
    state = intelligence.state_dict()
    state["start"]["net.0.weight"] = torch.zeros(1, 1)  # would broadcast
    with pytest.raises(ValueError, match=r"the state is of .*net\.0\.weight \(1, 1\)"):
        intelligence.load_state_dict(state)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    sites = tyxe.VariationalBNN(nn.Linear(2, 1), prior, likelihood, tyxe.guides.AutoNormal)
    with pytest.raises(ValueError, match=r"'weight' is a site of the prior.*hide_all=True"):
        SynapticIntelligence(sites)


# --------------------------------------------------------------------------- metrics

ACCURACY = torch.tensor(
    [
        [0.90, 0.50, math.nan],
        [0.95, 0.80, 0.60],
        [0.70, 0.85, 0.99],
    ]
)


def test_metrics_by_hand():
    torch.testing.assert_close(
        continual.average_accuracy(ACCURACY), torch.tensor([0.9, 0.875, 2.54 / 3])
    )
    # Since the best of each: 0.95 to 0.70, and 0.80 to 0.85.
    torch.testing.assert_close(
        continual.forgetting(ACCURACY), torch.tensor([0.0, -0.05, (0.25 - 0.05) / 2])
    )
    assert continual.backward_transfer(ACCURACY).item() == pytest.approx((-0.20 + 0.05) / 2)
    baseline = torch.tensor([0.5, 0.4, 0.5])
    transfer = continual.forward_transfer(ACCURACY, baseline)
    assert transfer.item() == pytest.approx((0.10 + 0.10) / 2)


@pytest.mark.parametrize(
    "metric",
    [continual.average_accuracy, continual.forgetting, continual.backward_transfer],
    ids=lambda metric: metric.__name__,
)
def test_metrics_take_several_runs_and_ignore_the_upper_triangle(metric):
    torch.manual_seed(0)
    runs = torch.rand(2, 4, 3, 3)
    each = torch.stack([torch.stack([metric(run) for run in group]) for group in runs])
    torch.testing.assert_close(metric(runs), each)
    torch.testing.assert_close(metric(runs.masked_fill(~torch.ones(3, 3).tril().bool(), 9)), each)


WRONG = {
    "integers": (lambda: continual.forgetting(torch.ones(2, 2).long()), TypeError, "floating"),
    "no square": (lambda: continual.average_accuracy(torch.ones(2, 3)), ValueError, r"\(2, 3\)"),
    "one task": (lambda: continual.backward_transfer(torch.ones(1, 1)), ValueError, "one task"),
    "not measured": (
        lambda: continual.forward_transfer(
            ACCURACY.tril() + ACCURACY.new_full((3, 3), torch.nan).triu(1), torch.ones(3)
        ),
        ValueError,
        "ahead=True",
    ),
    "baseline": (
        lambda: continual.forward_transfer(ACCURACY, torch.ones(2)),
        ValueError,
        r"shape \(2,\)",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_matrices(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# --------------------------------------------------------------------------- the figure


def test_the_figure_has_means_and_two_standard_errors():
    torch.manual_seed(0)
    runs = torch.rand(4, 3, 3)
    ax = plotting.accuracy_over_tasks({"several": runs, "one": ACCURACY})
    several, one = ax.containers
    average = continual.average_accuracy(runs)
    line, _, (bars,) = several
    torch.testing.assert_close(torch.tensor(line.get_ydata().tolist()), 100 * average.mean(0))
    assert line.get_xdata().tolist() == [1, 2, 3]
    heights = torch.tensor([[y for _, y in segment] for segment in bars.get_segments()])
    torch.testing.assert_close(heights.diff()[:, 0], 400 * average.std(0) / 2, check_dtype=False)
    expected = 100 * continual.average_accuracy(ACCURACY)
    torch.testing.assert_close(torch.tensor(one[0].get_ydata().tolist()), expected)
    assert not one.has_yerr
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["several", "one"]
    assert ax.get_ylabel() == "mean accuracy (%)"


def test_the_figure_has_the_tasks_that_all_runs_have_finished():
    runs = torch.rand(2, 4, 4)
    runs[0, 3], runs[1, 2:] = math.nan, math.nan  # stopped after three tasks, and after two
    ax = plotting.accuracy_over_tasks({"stopped": runs, "one": runs[0]})
    several, one = (container[0] for container in ax.containers)
    expected = 100 * continual.average_accuracy(runs)
    assert several.get_xdata().tolist() == [1, 2]
    found = torch.tensor(several.get_ydata().tolist())
    torch.testing.assert_close(found, expected[:, :2].mean(0))
    assert one.get_xdata().tolist() == [1, 2, 3]
    torch.testing.assert_close(torch.tensor(one.get_ydata().tolist()), expected[0, :3])


@pytest.mark.parametrize(
    ("results", "kind", "message"),
    [
        ({}, ValueError, "at least one method"),
        ({"a": torch.rand(2, 3)}, ValueError, r"'a' have shape \(2, 3\)"),
        ({"a": torch.rand(1, 2, 2, 2)}, ValueError, r"expected \(runs, T, T\)"),
        ({"a": torch.rand(3)}, ValueError, r"'a' have shape \(3,\)"),
        ({"a": torch.full((2, 2), math.nan)}, ValueError, "'a' are all NaN after the first"),
        (
            {"a": torch.tensor([[0.9, 0.0], [math.nan, 0.8]])},
            ValueError,
            r"`results\['a'\]` has 1 NaN",
        ),
        ({"a": [[1.0]]}, TypeError, "expected a tensor"),
    ],
)
def test_wrong_figures(results, kind, message):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    with pytest.raises(kind, match=message):
        plotting.accuracy_over_tasks(results)
    assert plt.get_fignums() == before
