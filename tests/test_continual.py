"""Contracts of the task loop and of heads: what is switched, saved, resumed and refused."""

import copy
import functools
import io
import math
import random

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from pyro.infer.mcmc import NUTS
from torch import nn

import tyxe
from tyxe.continual import Heads, TaskLoop, posterior_to_prior, restored
from tyxe.errors import TyxeWarning
from tyxe.guides import AutoNormal

N = 12
TASKS = ["first", "second", "third"]


class Net(nn.Module):
    """A body with a norm, and a head with one: buffers on both sides."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))

    def forward(self, x):
        return self.head(self.body(x))


def normal(**rules):
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def variational(guide=AutoNormal, **rules):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.VariationalBNN(Net(), normal(hide_modules=["head"], **rules), likelihood, guide)


def maximum_likelihood():
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.VariationalBNN(Net(), normal(hide_all=True), likelihood)


def laplace(**options):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.LaplaceBNN(Net(), normal(hide_modules=["head"]), likelihood, **options)


WRAPPERS = {
    "variational": variational,
    "low rank": lambda: variational(AutoLowRankMultivariateNormal),
    "maximum a posteriori": lambda: variational(AutoDelta),
    "maximum likelihood": maximum_likelihood,
    "Laplace, diagonal": lambda: laplace(structure="diag"),
    "Laplace, Kronecker": laplace,
    "Laplace, average of factors": lambda: laplace(accumulate="average"),
    "Laplace, penalties of tasks": lambda: laplace(accumulate="modes", multiplier=3.0),
    "Laplace, full": lambda: laplace(structure="full"),
}


def data(task):
    generator = torch.Generator().manual_seed(TASKS.index(task))
    x = torch.randn(N, 3, generator=generator)
    return x, (x[:, TASKS.index(task), None] > 0).float()


def assert_equal(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(actual[key], value)
    else:
        assert actual == expected


# --------------------------------------------------------------------------- heads


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_every_wrapper_learns_and_keeps_heads(make):
    bnn = make()
    heads = Heads(bnn, modules=["head"])
    start = {name: value.clone() for name, value in bnn.net.head.state_dict().items()}
    after = {}
    for task in TASKS:
        heads.start(task)
        assert_equal(dict(bnn.net.head.state_dict()), start)
        bnn.fit([data(task)], functools.partial(torch.optim.Adam, lr=1e-2), 2, progress=False)
        after[task] = {name: value.clone() for name, value in bnn.net.head.state_dict().items()}
        assert not torch.equal(after[task]["1.weight"], start["1.weight"])
        assert int(after[task]["0.num_batches_tracked"]) == 2
    for task in (*TASKS, *reversed(TASKS)):
        heads.use(task)
        assert heads.current == task
        assert_equal(dict(bnn.net.head.state_dict()), after[task])


def test_use_as_a_context_puts_the_head_back_even_after_an_error():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    for value, task in enumerate(TASKS):
        heads.start(task)
        bnn.net.head[1].bias.data.fill_(value)

    def breaks():
        with heads.use("first") as inside:
            assert inside is heads
            assert bnn.net.head[1].bias.item() == 0
            with heads.use("second"):
                assert bnn.net.head[1].bias.item() == 1
            assert bnn.net.head[1].bias.item() == 0
            bnn.net.head[1].bias.data.fill_(7.0)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert (heads.current, bnn.net.head[1].bias.item()) == ("third", 2)
    heads.use("first")
    assert bnn.net.head[1].bias.item() == 7, "what is trained inside a context is kept"


def test_switching_is_in_place():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    before = {name: id(tensor) for name, tensor in bnn.net.head.state_dict(keep_vars=True).items()}
    heads.start("first")
    heads.start("second")
    heads.use("first")
    after = {name: id(tensor) for name, tensor in bnn.net.head.state_dict(keep_vars=True).items()}
    assert before == after


def test_heads_of_a_bnn_that_was_moved():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    bnn.to(torch.float64)  # which replaces the buffers of its norms
    start = bnn.net.head[0].running_mean.clone()
    heads.start("first")
    bnn.net.head[0].running_mean.fill_(3.0)
    heads.start("second")
    assert torch.equal(bnn.net.head[0].running_mean, start)
    heads.use("first")
    assert bnn.net.head[0].running_mean.tolist() == [3.0] * 5


def test_heads_save_and_load():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    for value, task in enumerate(TASKS):
        heads.start(task)
        bnn.net.head[1].bias.data.fill_(value)
    heads.use("second")
    torch.save(heads.state_dict(), file := io.BytesIO())
    file.seek(0)
    fresh = variational()
    loaded = Heads(fresh, modules=["head"])
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert (loaded.current, loaded.tasks) == ("second", TASKS)
    assert fresh.net.head[1].bias.item() == 1
    with loaded.use("third"):
        assert fresh.net.head[1].bias.item() == 2
    # What is loaded is a copy.
    bnn.net.head[1].bias.data.fill_(9.0)
    loaded.use("second")
    assert fresh.net.head[1].bias.item() == 1


def test_heads_of_another_shape_change_nothing():
    heads = Heads(bnn := variational(), modules=["head"])
    other = Heads(variational(), modules=["head.0"])
    heads.start("first")
    before = copy.deepcopy(bnn.state_dict())
    with pytest.raises(ValueError, match=r"heads with head\.0\.weight \(5,\)"):
        heads.load_state_dict(other.state_dict())
    assert_equal(dict(bnn.state_dict()), dict(before))
    assert heads.tasks == ["first"]


def tied():
    net = Net()
    net.head[1].bias = nn.Parameter(torch.zeros(1))
    net.tied = nn.Linear(3, 5)
    net.tied.weight = net.body[0].weight
    return tyxe.VariationalBNN(
        net,
        normal(expose_modules=["body"]),
        tyxe.likelihoods.Bernoulli(N, event_dim=1),
        AutoNormal,
    )


WRONG_HEADS = {
    "no BNN": (lambda: Heads(Net(), ["head"]), TypeError, "is a Net; expected a BNN"),
    "a string": (lambda: Heads(variational(), "head"), TypeError, r"modules=\['head'\]"),
    "a module": (
        lambda: Heads(variational(), [variational().net.head]),
        TypeError,
        r"modules has a Sequential; expected names.*modules=\[\"2\"\]",
    ),
    "one module": (lambda: Heads(variational(), nn.Linear(5, 1)), TypeError, "has a Linear"),
    "no such part": (lambda: Heads(variational(), ["tail"]), ValueError, "'tail', which the net"),
    "nothing in it": (lambda: Heads(variational(), ["body.1"]), ValueError, "neither parameters"),
    "a site": (
        lambda: Heads(variational(), ["body"]),
        ValueError,
        r"'body.0.weight' is a site of the prior.*hide_modules=\['body.0'\]",
    ),
    "a site by another name": (lambda: Heads(tied(), ["tied"]), ValueError, "'tied.weight' is a"),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG_HEADS.values(), ids=WRONG_HEADS.keys())
def test_wrong_heads(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def norm_in_the_body(**rules):
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, **rules), nn.Tanh(), nn.Linear(5, 1))
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.VariationalBNN(net, normal(hide_modules=["1", "3"]), likelihood, AutoNormal)


def test_shared_running_statistics_warn_and_those_of_each_task_do_not():
    message = r"statistics of 1 are shared.*modules=\[\.\.\., '1'\].*hide_modules=\[\.\.\., '1'\]"
    bnn = norm_in_the_body()
    with pytest.warns(TyxeWarning, match=message):
        Heads(bnn, ["3"])
    with pytest.warns(TyxeWarning, match=message):
        Heads(bnn.eval(), ["3"])  # a fit would put it into train mode
    assert not any(module.training for module in bnn.modules())
    bnn.train()
    heads = Heads(bnn, ["1", "3"])
    heads.start("first")
    bnn.fit([data("first")], torch.optim.Adam, 5)
    bnn.eval()
    x, _ = data("first")
    before = bnn.net(x)
    heads.start("second")
    bnn.fit([data("second")], torch.optim.Adam, 5)
    heads.use("first")
    assert torch.equal(bnn.net(x), before)  # at the values of the sites that the net came with


def test_statistics_that_nobody_updates_do_not_warn():
    Heads(norm_in_the_body(track_running_stats=False), ["3"])
    kept = norm_in_the_body()
    kept.net[1].eval()
    Heads(kept, ["3"])
    frozen = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).eval()
    frozen[:2].requires_grad_(False)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    bnn = tyxe.VariationalBNN(frozen, normal(hide_all=True), likelihood)
    Heads(bnn, ["2"])
    Heads(bnn.eval(), ["2"])


def test_heads_of_another_bnn_are_refused():
    bnn, heads = variational(), Heads(variational(), ["head"])
    with pytest.raises(ValueError, match=r"those of another BNN.*Heads\(bnn, modules="):
        TaskLoop(bnn, TASKS, lambda task: None, lambda task: 0.0, heads=heads)
    before = copy.deepcopy(dict(bnn.state_dict()))
    with pytest.raises(ValueError, match="those of another BNN"), restored(bnn, heads):
        pass
    assert_equal(dict(bnn.state_dict()), before)
    # Copied together they stay together.
    copied, switched = copy.deepcopy((heads._bnn, heads))
    switched.check_of(copied)


def test_a_missing_head_names_the_known_tasks():
    heads = Heads(bnn := variational(), modules=["head"])
    with pytest.raises(ValueError, match="those with one are: none"):
        heads.use("first")
    heads.start("first")
    heads.start("second")
    bnn.net.head[1].bias.data.fill_(5.0)
    with pytest.raises(ValueError, match=r"'third' has no head.*'first', 'second'.*start\('third'"):
        heads.use("third")
    with pytest.raises(ValueError, match=r"has a head already: go on with it by use\('first'\)"):
        heads.start("first")
    assert (heads.current, bnn.net.head[1].bias.item()) == ("second", 5)


# --------------------------------------------------------------------------- the loop


def loop_of(make, tasks=TASKS, **options):
    bnn = make()
    heads = Heads(bnn, modules=["head"])

    def fit(task):
        x, y = data(task)
        order = torch.randperm(N)  # the run depends on the random generator
        bnn.fit([(x[order], y[order])], functools.partial(torch.optim.Adam, lr=1e-2), 3)

    def evaluate(task):
        return 1 - bnn.evaluate(*data(task), num_predictions=2, reduction="mean")[0].item()

    # A point estimate has no posterior to make a prior of.
    update = (lambda task: None) if make is WRAPPERS["maximum a posteriori"] else None
    return TaskLoop(bnn, tasks, fit, evaluate, update, heads=heads, **options)


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_is_uninterrupted(make, stop, tmp_path):
    torch.manual_seed(1)
    whole = loop_of(make)
    expected = whole.run()
    path = tmp_path / "new" / "run.pt"
    torch.manual_seed(1)
    first = loop_of(make)
    first.run(path, callback=lambda task, scores: len(scores) == stop)
    assert first.done == stop
    assert bool(first.accuracy[stop:].isnan().all())
    second = loop_of(make)
    torch.manual_seed(99)
    learned = []
    actual = second.run(path, callback=lambda task, scores: learned.append(task))
    assert learned == TASKS[stop:]
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
    assert_equal(dict(second.bnn.state_dict()), dict(whole.bnn.state_dict()))
    assert_equal(second.heads.state_dict(), whole.heads.state_dict())
    # A finished run is read, not run again.
    third = loop_of(make)
    assert torch.equal(third.run(path).nan_to_num(-1), expected.nan_to_num(-1))


def test_the_random_generators_are_resumed(tmp_path):
    def draws():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    np.random.randn()  # which keeps a second draw for later
    random.gauss(0, 1)
    loop_of(variational).run(tmp_path / "run.pt", callback=lambda task, scores: True)
    expected = draws()
    draws()
    second = loop_of(variational)
    state = torch.load(tmp_path / "run.pt", weights_only=True)
    second.load_state_dict(state)
    assert draws() == expected
    # A state of PyTorch's generator alone.
    before = np.random.get_state()[1].tolist()
    second.load_state_dict({k: v for k, v in state.items() if k not in ("numpy", "python")})
    assert torch.rand(3).tolist() == expected[0]
    assert np.random.get_state()[1].tolist() == before


def test_the_posterior_becomes_the_prior():
    loop = loop_of(variational)
    for _ in TASKS:
        loop.run(callback=lambda task, scores: True)
        priors = dict(loop.bnn.net_prior.priors())
        posteriors = loop.bnn.net_guide.get_detached_distributions()
        assert priors.keys() == posteriors.keys() == {"body.0.weight", "body.0.bias"}
        for name, posterior in posteriors.items():
            assert torch.equal(priors[name].mean, posterior.mean)
            assert torch.equal(priors[name].variance, posterior.variance)
        kl = tyxe.bnn.elbo_terms(loop.bnn.net_prior, loop.bnn.net_guide).kl
        assert abs(kl.item()) < 1e-5  # rounding of a sum over 20 weights in float32
    assert loop.done == 3


def test_draws_do_not_become_a_prior():
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    bnn = tyxe.MCMC_BNN(nn.Linear(3, 1), normal(), likelihood, NUTS)
    with pytest.raises(TypeError, match=r"MCMC_BNN has draws, and no guide.*update= to the Task"):
        posterior_to_prior(bnn)


def test_without_sites_there_is_no_prior_to_update():
    bnn = maximum_likelihood()
    before = copy.deepcopy(bnn.state_dict())
    posterior_to_prior(bnn)
    assert_equal(dict(bnn.state_dict()), dict(before))


def test_the_matrix_holds_what_evaluate_returned():
    calls = []

    def evaluate(task):
        calls.append((task, len(calls)))
        return len(calls) / 100

    bnn = variational()
    loop = TaskLoop(bnn, TASKS, lambda task: None, evaluate, lambda task: None, ahead=True)
    accuracy = loop.run()
    asked = [task for task, _ in calls]
    assert asked == ["first", "second", "first", "second", "third", "first", "second", "third"]
    expected = [[0.01, 0.02, math.nan], [0.03, 0.04, 0.05], [0.06, 0.07, 0.08]]
    torch.testing.assert_close(accuracy, torch.tensor(expected), equal_nan=True)
    accuracy.zero_()
    assert loop.accuracy[0, 0] != 0, "what is returned is a copy"


def test_evaluation_sees_each_tasks_own_head():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    seen = []
    TaskLoop(
        bnn,
        TASKS,
        fit=lambda task: bnn.net.head[1].bias.data.fill_(TASKS.index(task)),
        evaluate=lambda task: seen.append((task, bnn.net.head[1].bias.item())) or 0.0,
        heads=heads,
    ).run()
    assert seen == [(task, i) for t in range(3) for i, task in enumerate(TASKS[: t + 1])]
    assert heads.current == "third"


def test_an_interrupted_fit_can_be_run_again():
    loop, fits = loop_of(variational), []
    fit = loop.fit

    def breaks_once(task):
        fits.append(task)
        if fits == ["first", "second"]:
            raise KeyboardInterrupt
        return fit(task)

    loop.fit = breaks_once
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.done == 1
    assert not bool(loop.run()[2].isnan().any())
    assert fits == ["first", "second", "second", "third"]


@pytest.mark.parametrize("name", ["variational", "Laplace, Kronecker", "Laplace, full"])
@pytest.mark.parametrize("call", ["update", "evaluate"])
@pytest.mark.parametrize("task", TASKS[:2])
def test_what_is_done_of_a_task_is_not_done_again(name, call, task):
    torch.manual_seed(1)
    whole = loop_of(WRAPPERS[name], ahead=True)
    expected = whole.run()
    torch.manual_seed(1)
    loop, fits = loop_of(WRAPPERS[name], ahead=True), []
    fit, right = loop.fit, getattr(loop, call)

    def counted(task):
        fits.append(task)
        fit(task)

    def wrong(asked):
        if task not in fits:
            return right(asked)
        raise TypeError

    loop.fit = counted
    setattr(loop, call, wrong)
    with pytest.raises(TypeError):
        loop.run()
    assert loop.done == TASKS.index(task)
    setattr(loop, call, right)
    assert torch.equal(loop.run().nan_to_num(-1), expected.nan_to_num(-1))
    assert fits == TASKS
    assert_equal(dict(loop.bnn.state_dict()), dict(whole.bnn.state_dict()))


def test_a_loaded_state_is_between_tasks():
    loop, saved = loop_of(variational), loop_of(variational).state_dict()
    evaluate, loop.evaluate = loop.evaluate, lambda task: (1.0, 2.0)
    with pytest.raises(TypeError):
        loop.run()
    loop.load_state_dict(saved)
    fits = []
    loop.evaluate, loop.fit = evaluate, fits.append
    loop.run()
    assert fits == TASKS


def test_a_state_within_a_task_knows_how_far_it_has_come():
    """What was fitted before it was saved is not fitted again under its own posterior."""
    loop, fits = loop_of(variational), []
    loop.evaluate = lambda task: (1.0, 2.0)
    with pytest.raises(TypeError):
        loop.run()
    other = loop_of(variational)
    other.load_state_dict(loop.state_dict())
    other.fit = fits.append
    other.run()
    assert fits == TASKS[1:]


def test_further_parts_are_saved(tmp_path):
    class Counter:
        def __init__(self):
            self.count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    first, second = Counter(), Counter()
    first.count = 3
    path = tmp_path / "run.pt"
    loop_of(variational, parts={"counter": first}).run(path, lambda task, scores: True)
    loop_of(variational, parts={"counter": second}).run(path, lambda task, scores: True)
    assert second.count == 3
    with pytest.raises(ValueError, match=r"has the parts \['counter', 'heads'\], this loop"):
        loop_of(variational).run(path)


def test_an_optimiser_of_all_tasks_is_resumed_as_a_part():
    def make():
        bnn = variational()
        adam = torch.optim.Adam(bnn.parameters(), lr=1e-2)
        return TaskLoop(
            bnn,
            TASKS,
            lambda task: bnn.fit([data(task)], adam, 3),
            lambda task: 0.0,
            parts={"adam": adam},
        )

    torch.manual_seed(1)
    first = make()
    first.run(callback=lambda task, scores: True)
    state = first.state_dict()
    first.run()
    for _ in range(2):  # neither the first loop nor one that goes on changes the state
        second = make()
        second.load_state_dict(state)
        second.run()
        assert_equal(dict(second.bnn.state_dict()), dict(first.bnn.state_dict()))


def test_another_order_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    loop_of(variational).run(path, callback=lambda task, scores: True)
    other = loop_of(variational, ["second", "first", "third"])
    before = copy.deepcopy(other.bnn.state_dict())
    with pytest.raises(ValueError, match="resume in the same order"):
        other.run(path)
    assert other.done == 0
    assert_equal(dict(other.bnn.state_dict()), dict(before))


def test_more_tasks_may_follow(tmp_path):
    torch.manual_seed(1)
    expected = (whole := loop_of(variational)).run()
    torch.manual_seed(1)
    path = tmp_path / "run.pt"
    two = loop_of(variational, TASKS[:2]).run(path)
    three = loop_of(variational)
    actual = three.run(path)
    assert torch.equal(actual[:2, :2].nan_to_num(-1), two.nan_to_num(-1))
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
    assert_equal(dict(three.bnn.state_dict()), dict(whole.bnn.state_dict()))
    for tasks in (TASKS[:2], [*TASKS[1:], "first"]):
        with pytest.raises(ValueError, match="resume in the same order"):
            loop_of(variational, tasks).run(path)


@pytest.mark.parametrize("written", ["empty", "text", "zip", "another state"])
def test_a_file_that_is_no_checkpoint(written, tmp_path):
    path = tmp_path / "run.pt"
    if written == "another state":
        torch.save(variational().state_dict(), path)
    else:
        path.write_bytes({"empty": b"", "text": b"accuracy: 0.9", "zip": b"PK\x03\x04"}[written])
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"run\.pt (is no|cannot be read as a) checkpoint of a TaskLoop"
    ):
        loop_of(variational).run(path)
    assert path.read_bytes() == before


def test_a_state_that_fits_the_bnn_and_not_the_heads_changes_nothing():
    saved = loop_of(lambda: variational(AutoLowRankMultivariateNormal))
    saved.run(callback=lambda task, scores: True)
    other = loop_of(lambda: variational(AutoLowRankMultivariateNormal))
    other.heads = Heads(other.bnn, modules=["head.0"])
    before = other.state_dict()
    with pytest.raises(ValueError, match="the state is of heads with"):
        other.load_state_dict(saved.state_dict())
    after = other.state_dict()
    assert torch.equal(before.pop("accuracy").isnan(), after.pop("accuracy").isnan())
    assert torch.equal(before.pop("rng")[0], after.pop("rng")[0])
    assert_equal(after, {**before, "bnn": dict(before["bnn"])})
    assert not other.bnn.net_prior.joints()


@pytest.mark.parametrize(
    ("tasks", "kind", "message"),
    [
        ("01", TypeError, "tasks is '01'; expected a list"),
        ([], ValueError, "tasks is"),
        (["a", "a"], ValueError, "tasks is"),
        (np.arange(2), TypeError, r"tasks has .*0.*, a int64; expected .* str or int"),
        ([1, True], TypeError, "tasks has True, a bool"),
        ([["a"]], TypeError, r"tasks has \['a'\], a list"),
    ],
)
def test_wrong_tasks(tasks, kind, message):
    with pytest.raises(kind, match=message):
        TaskLoop(variational(), tasks, lambda task: None, lambda task: 0.0)


# --------------------------------------------------------------------------- for one prediction


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_restored_undoes_a_fit(make):
    bnn = make()
    heads = Heads(bnn, modules=["head"])
    heads.start("first")
    heads.start("second")
    bnn.eval()
    before = copy.deepcopy((dict(bnn.state_dict()), heads.state_dict()))

    def breaks():
        with restored(bnn, heads):
            heads.use("first")
            bnn.likelihood.dataset_size = 3
            bnn.fit([[part[:3] for part in data("first")]], torch.optim.Adam, 2, progress=False)
            heads.start("third")
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert_equal(dict(bnn.state_dict()), before[0])
    assert_equal(heads.state_dict(), before[1])
    assert (bnn.likelihood.dataset_size, heads.current) == (N, "second")
    assert not any(module.training for module in bnn.modules())


@pytest.mark.parametrize("name", ["low rank", "Laplace, Kronecker"])
def test_restored_undoes_a_prior_of_another_kind(name):
    bnn = WRAPPERS[name]()
    bnn.fit([data("first")], torch.optim.Adam, 2, progress=False)
    before, prior = copy.deepcopy(dict(bnn.state_dict())), bnn.prior

    def breaks():
        with restored(bnn):
            posterior_to_prior(bnn)
            assert bnn.net_prior.joints()
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert not bnn.net_prior.joints()
    assert bnn.prior is prior
    assert bnn.state_dict().keys() == before.keys()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(bnn.state_dict()[key], value)


def test_restored_puts_what_belongs_to_the_wrapper_back():
    bnn = variational()
    adam = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    bnn.fit([data("first")], adam, 3)
    epochs = bnn.checkpoint()["epoch"]
    with restored(bnn):
        bnn.fit([data("second")], torch.optim.SGD(bnn.parameters(), lr=1e-3), 5)
    assert bnn.optimizer is adam
    assert bnn.checkpoint()["epoch"] == epochs == 3
    bnn = laplace(multiplier=3.0)
    bnn.fit([data("first")], torch.optim.Adam, 2)
    before = copy.deepcopy(dict(bnn.state_dict()))
    with restored(bnn):
        bnn.multiplier, bnn.temperature = 5.0, 0.5
        bnn.fit([data("second")], torch.optim.Adam, 2)
    assert (bnn.multiplier, bnn.temperature) == (3.0, 1.0)
    assert_equal(dict(bnn.state_dict()), before)
