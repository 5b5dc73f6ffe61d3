"""Right values of what has weights, masks and holes, of other targets, and of several outputs."""

import functools

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe import predictive
from tyxe.calibration import ScaleFactor, SplitConformal, TemperatureScaling
from tyxe.data import Targets, weighted
from tyxe.diagnostics import reference, scores, wasserstein2
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HomoskedasticGaussian,
    Joint,
    Poisson,
    censored_targets,
)

PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
HIDDEN = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_all=True)
STILL = functools.partial(torch.optim.SGD, lr=0.0)
N = 40


@pytest.fixture(autouse=True)
def _in_double_precision():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def plain(net, likelihood):
    return tyxe.VariationalBNN(net, HIDDEN, likelihood)


class Two(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.k, self.s = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, x):
        return {"k": self.k(x), "s": self.s(x)}


def joint(size=N, **options):
    return Joint(k=Categorical(size, **options), s=HomoskedasticGaussian(size, scale=0.5))


# --- holes within points ------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 4])
def test_numbers_that_are_missing_count_nowhere(batches):
    x, y, net = torch.randn(N, 2), torch.randn(N, 3), nn.Linear(2, 3)
    kept = torch.rand(N, 3) < 0.6
    kept[:, 0] = True
    holes = y.where(kept, torch.nan)
    loader = list(zip(x.chunk(batches), holes.chunk(batches), strict=True))
    bnn, z = plain(net, HomoskedasticGaussian(N, scale=0.5)), (y - net(x).detach())[kept]
    found = scores(bnn, loader, num_predictions=0)
    assert found["RMSE"] == pytest.approx(float(z.square().mean().sqrt()))
    factor = ScaleFactor().wrap(bnn, loader, num_predictions=0).calibrator.factor
    assert factor == pytest.approx(float((z / 0.5).square().mean().sqrt()))
    each = torch.distributions.Normal(0.0, 0.5).log_prob(z).sum()
    torch.testing.assert_close(bnn.evaluate(loader)[1], each)
    assert bnn.fit(loader, STILL, 1).log_likelihood[0] == pytest.approx(float(each))
    far = (y - net(x).detach()).abs().where(kept, 0.0).amax(1) / 0.5
    held = SplitConformal(level=0.7).wrap(bnn, loader, num_predictions=0)
    assert held.calibrator.threshold == pytest.approx(float(far.sort().values[28]))


def test_holes_of_some_batches_alone():
    """Chains and members that go through batches in orders of their own, some with holes."""
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    y[3] = torch.nan
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, 10, shuffle=True)
    noise, sgld = HomoskedasticGaussian(N, scale=0.5), tyxe.samplers.SGLD(lr=1e-3)
    chains = tyxe.MCMC_BNN(nn.Linear(2, 1), PRIOR, noise, sgld)
    chains.fit(loader, 12, warmup_steps=4, num_chains=3, progress=False)
    assert bool(chains.get_samples()["net.weight"].isfinite().all())
    members = tyxe.EnsembleBNN(
        lambda seed: plain(tyxe.util.reset_parameters_(nn.Linear(2, 1)), noise), 3
    )
    histories = members.fit(loader, torch.optim.Adam, 3, vectorize=True, progress=False)
    assert all(torch.tensor(h.loss).isfinite().all() for h in histories)


def test_a_fit_of_nothing_warns():
    y = torch.full((N, 1), torch.nan)
    bnn = plain(nn.Linear(2, 1), Poisson(N))
    with pytest.warns(tyxe.TyxeWarning, match="no point of an epoch counts"):
        bnn.fit([(torch.randn(N, 2), y)], STILL, 1)
    chains = tyxe.MCMC_BNN(nn.Linear(2, 1), PRIOR, Poisson(N), tyxe.samplers.HMC)
    with pytest.raises(ValueError, match="no point"):
        chains.fit([(torch.randn(N, 2), y)], 1, warmup_steps=0)


def test_integers_as_a_third_element_name_unpack():
    with pytest.warns(tyxe.TyxeWarning, match=r"integers, .* unpack=lambda batch: batch\[:2\]"):
        weighted(torch.zeros(3), torch.arange(3))
    x, y, weights = torch.randn(N, 2), torch.randn(N, 1), torch.arange(N) % 3
    bnn = plain(nn.Linear(2, 1), HomoskedasticGaussian(N, scale=0.5))
    with pytest.warns(tyxe.TyxeWarning, match="unpack"):
        bnn.fit([(x, y, weights)], STILL, 1)
    bnn.fit([(x, y, weights)], STILL, 1, unpack=lambda batch: batch)  # and so named
    assert weighted(torch.zeros(2), torch.tensor([True, False])).weights.tolist() == [1, 0]


# --- probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Categorical, Bernoulli])
def test_probabilities_are_judged_as_the_logits_that_they_are_of(kind):
    x = torch.randn(N, 2)
    net = nn.Linear(2, 3 if kind is Categorical else 1)
    last = nn.Softmax(-1) if kind is Categorical else nn.Sigmoid()
    probs = last(net(x).detach())
    y = torch.multinomial(probs, 1)[:, 0] if kind is Categorical else torch.bernoulli(probs)
    one = plain(net, kind(N))
    other = plain(nn.Sequential(net, last), kind(N, logit_predictions=False))
    assert dict(scores(one, [(x, y)])) == pytest.approx(dict(scores(other, [(x, y)])))
    sets, temperatures = [], []
    for bnn in (one, other):
        sets.append(SplitConformal("lac", 0.7).wrap(bnn, [(x, y)]).predict(x))
        wrapped = TemperatureScaling().wrap(bnn, [(x, y)])
        temperatures.append(wrapped.calibrator.temperature)
        found = wrapped.predict(x)
    assert torch.equal(sets[0], sets[1])
    assert temperatures[0] == pytest.approx(temperatures[1])
    logits = one.predict(x) / temperatures[0]
    torch.testing.assert_close(found, last(logits))


def test_probabilities_as_targets_are_cross_entropy():
    x, q, net = torch.randn(N, 2), torch.randn(N, 3).softmax(-1), nn.Linear(2, 3)
    logits = net(x).detach()
    right = -nn.functional.cross_entropy(logits, q, reduction="sum")
    bnn = plain(net, Categorical(N))
    assert bnn.fit([(x, q)], STILL, 1).log_likelihood[0] == pytest.approx(float(right))
    error, log_likelihood = bnn.evaluate(x, q)
    torch.testing.assert_close(log_likelihood, right)
    torch.testing.assert_close(error, (1 - q.gather(1, logits.argmax(1)[:, None])).sum())
    labels = torch.randint(3, (N,))
    one_hot = nn.functional.one_hot(labels, 3).double()
    for curvature in ("ggn", "empirical"):
        found = []
        for y in (labels, one_hot):
            laplace = tyxe.LaplaceBNN(net, PRIOR, Categorical(N), curvature=curvature)
            laplace.fit_curvature([(x, y)])
            found.append(laplace.log_marginal_likelihood())
        torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="expected probabilities of the classes"):
        bnn.evaluate(x, 2 * q)
    with pytest.raises(ValueError, match="expected probabilities of the classes"):
        bnn.evaluate(x, torch.cat([q[:, :1] - 1, q[:, 1:] + 0.5], 1))
    with pytest.raises(TypeError, match="pass labels"):
        SplitConformal(level=0.5).wrap(bnn, [(x, q)])


def test_probabilities_have_a_temperature():
    x, net = torch.randn(N, 2), nn.Linear(2, 3)
    labels = torch.randint(3, (N,))
    found = []
    one_hot = nn.functional.one_hot(labels, 3).double()
    holes = one_hot.clone()
    holes[5] = torch.nan
    kept = torch.arange(N) != 5
    for inputs, y in ((x, labels), (x, one_hot), (x[kept], labels[kept]), (x, holes)):
        wrapped = TemperatureScaling().wrap(plain(net, Categorical(N)), [(inputs, y)])
        found.append(wrapped.calibrator.temperature)
    assert found[0] == pytest.approx(found[1])
    assert found[2] == pytest.approx(found[3])
    logits, q = 3 * torch.randn(500, 4), torch.randn(500, 4).softmax(-1)
    best = TemperatureScaling().fit(logits, q).temperature
    losses = [nn.functional.cross_entropy(logits / (best * s), q) for s in (1.0, 0.99, 1.01)]
    assert losses[0] < min(losses[1:])
    with pytest.raises(ValueError, match="expected probabilities that sum to 1"):
        TemperatureScaling().fit(logits, 2 * q)


@pytest.mark.parametrize("pixels", [False, True])
def test_probabilities_count_by_the_weights_of_classes(pixels):
    x, net = torch.randn(N, 2), nn.Linear(2, 12)
    shape = (N, 4, 3) if pixels else (N, 12)
    inner = nn.Sequential(net, nn.Unflatten(1, (4, 3))) if pixels else net
    q, weights = torch.randn(shape).softmax(-1), torch.rand(shape[-1])
    q[3] = torch.nan
    logits = inner(x).detach()
    likelihood = Categorical(N, class_weights=weights, event_dim=int(pixels))
    weights = likelihood.class_weights.double()  # as they are kept
    targets = q.movedim(-1, 1).nan_to_num(0.0)
    right = -nn.functional.cross_entropy(logits.movedim(-1, 1), targets, weights, reduction="sum")
    bnn = plain(inner, likelihood)
    ((_, found),) = bnn._to_fit([(x, q)])
    torch.testing.assert_close(bnn.likelihood.log_likelihood(logits, found, "sum"), right)
    assert float(bnn.likelihood.count(found)) <= N
    plainly = -nn.functional.cross_entropy(logits.movedim(-1, 1), targets, reduction="sum")
    torch.testing.assert_close(bnn.evaluate(x, q)[1], plainly)


@pytest.mark.parametrize("first", [1.0, 0.0])
@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 3)])
def test_the_weight_of_positives_is_that_of_torch(shape, first):
    x, y = torch.randn(N, 2), (torch.rand(shape) < 0.3).double()
    size = shape[1] if len(shape) > 1 else 1
    net = nn.Linear(2, size)
    inner = net if len(shape) > 1 else nn.Sequential(net, nn.Flatten(0))
    weight = torch.arange(first, first + 3) if size == 3 else torch.tensor(5.0 * first)
    logits = inner(x).detach()
    loss = nn.functional.binary_cross_entropy_with_logits
    right = -loss(logits, y, pos_weight=weight, reduction="sum")
    bnn = plain(inner, Bernoulli(N, pos_weight=weight))
    for batches in (1, 4):  # of as many points
        loader = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
        assert bnn.fit(loader, STILL, 1).log_likelihood[0] == pytest.approx(float(right))
    torch.testing.assert_close(bnn.evaluate(x, y)[1], -loss(logits, y, reduction="sum"))
    holes = y.masked_fill(torch.rand(shape) < 0.2, torch.nan)
    each = loss(logits, holes.nan_to_num(0.0), pos_weight=weight, reduction="none")
    ((_, found),) = bnn._to_fit([(x, holes)])
    found = bnn.likelihood.log_likelihood(logits, found, "sum")
    torch.testing.assert_close(found, -each[~holes.isnan()].sum())
    expected = torch.autograd.functional.hessian(
        lambda w: loss(
            (x @ w.view(2, size)).view(shape),
            y,
            pos_weight=weight,
            reduction="sum",
        ),
        torch.zeros(2 * size),
    )
    bare = nn.Linear(2, size, bias=False)
    nn.init.zeros_(bare.weight)
    inner = bare if len(shape) > 1 else nn.Sequential(bare, nn.Flatten(0))
    laplace = tyxe.LaplaceBNN(inner, PRIOR, Bernoulli(N, pos_weight=weight), structure="full")
    laplace.fit_curvature([(x, y)])
    order = torch.arange(2 * size).view(2, size).mT.flatten()
    torch.testing.assert_close(
        laplace.state.curvature.operator.to_dense(), expected[order][:, order]
    )


def test_bad_weights_of_positives():
    for bad in (-1.0, torch.tensor([1.0, torch.nan])):
        with pytest.raises(ValueError, match=r"pos_weight is .*; expected numbers of 0 or more"):
            Bernoulli(N, pos_weight=bad)


# --- several outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("holes", [False, True])
def test_tasks_count_by_their_weights_in_fits(holes):
    x, net = torch.randn(N, 2), Two()
    y = {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}
    if holes:
        y["s"][:7] = torch.nan
    weights = {"k": 0.25, "s": 3.0}
    each = plain(net, joint()).evaluate([(x, y)])[1]
    right = sum(weights[name] * each[name] for name in weights)
    weighted_joint = Joint(weights=weights, k=Categorical(N), s=HomoskedasticGaussian(N, scale=0.5))
    bnn = plain(net, weighted_joint)
    assert bnn.fit([(x, y)], STILL, 1).log_likelihood[0] == pytest.approx(float(right))
    torch.testing.assert_close(bnn.evaluate([(x, y)])[1], each)
    matrices = {}
    for name, of in (("k", {"s": 0.0}), ("s", {"k": 0.0}), ("both", weights)):
        likelihood = Joint(weights=of, k=Categorical(N), s=HomoskedasticGaussian(N, scale=0.5))
        for structure in ("full", "diag"):
            laplace = tyxe.LaplaceBNN(net, PRIOR, likelihood, structure=structure)
            laplace.fit_curvature([(x, y)])
            curve = laplace.state.curvature
            matrices[name, structure] = curve.operator.to_dense() * curve.points
    for structure in ("full", "diag"):
        expected = 0.25 * matrices["k", structure] + 3 * matrices["s", structure]
        torch.testing.assert_close(matrices["both", structure], expected)


def test_weights_of_parts_count_in_fits_of_a_joint():
    x, net = torch.randn(N, 2), Two()
    y = {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}
    classes = torch.tensor([0.5, 2.0, 1.5])
    each = plain(net, joint()).evaluate([(x, y)], reduction="none")[1]
    right = (classes[y["k"]] * each["k"] + each["s"]).sum()
    bnn = plain(net, joint(class_weights=classes))
    assert bnn.fit([(x, y)], STILL, 1).log_likelihood[0] == pytest.approx(float(right))


def test_probabilities_are_a_part_of_a_joint():
    x, net = torch.randn(N, 2), Two()
    q, labels = torch.randn(N, 3).softmax(-1), torch.randn(N, 1)
    each = [
        plain(net, joint()).evaluate(
            [(x, {"k": torch.full((N,), c), "s": labels})], reduction="none"
        )
        for c in range(3)
    ]
    right = sum(q[:, c] * each[c][1]["k"] for c in range(3)).sum()
    found = plain(net, joint()).evaluate([(x, {"k": q, "s": labels})])[1]
    torch.testing.assert_close(found["k"], right)
    bnn = plain(net, joint())
    history = bnn.fit([(x, {"k": q, "s": labels})], STILL, 1)
    assert history.log_likelihood[0] == pytest.approx(float(found["joint"]))
    drawn = bnn.sample_predictive(x, num_samples=4)
    assert drawn["k"].shape == (4, N, 3)
    assert bool((drawn["k"].sum(-1) == 1).all())
    assert drawn["s"].shape == (4, N, 1)


def test_numbers_of_a_censored_part_are_drawn():
    x, pairs = torch.randn(N, 2), censored_targets(torch.randn(N, 1))
    likelihood = Joint(k=Categorical(N), s=Censored(HomoskedasticGaussian(N, scale=0.5)))
    bnn = plain(Two(), likelihood)
    bnn.fit([(x, {"k": torch.zeros(N, dtype=torch.long), "s": pairs})], STILL, 1)
    drawn = bnn.sample_predictive(x, num_samples=4)
    assert drawn["s"].shape == (4, N, 1)
    assert bnn.predictive(x)["s"].mean.shape == (N, 1)


# --- direct calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Bernoulli, Poisson])
def test_numbers_are_missing_in_calls_of_the_likelihood_too(kind):
    f, y = torch.randn(N, 2), torch.randint(2, (N, 2)).double()
    gaps = torch.rand(N, 2) < 0.3
    holes, likelihood = y.masked_fill(gaps, torch.nan), kind(N)
    masked = Targets(y, None, ~gaps)
    for method in (likelihood.error, likelihood.log_likelihood):
        torch.testing.assert_close(method(f, holes), method(f, masked))
        torch.testing.assert_close(method(f, holes, "mean"), method(f, masked, "mean"))
    found = likelihood.mixture_log_likelihood(torch.stack([f, -f]), holes)
    torch.testing.assert_close(
        found, likelihood.mixture_log_likelihood(torch.stack([f, -f]), masked)
    )


def test_the_sum_of_weights_is_a_size_of_the_data():
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    weights = torch.rand(N) + 0.1
    total, net = float(weights.sum()), nn.Linear(2, 1)
    found = []
    for scale in (1.0, 2.5):
        bnn = plain(net, HomoskedasticGaussian(scale * total, scale=0.5))
        assert bnn.likelihood.dataset_size == pytest.approx(scale * total)
        if scale == 1.0:
            found.append(bnn.fit([(x, y, weights)], STILL, 1).log_likelihood[0])
            each = bnn.evaluate(x, y, reduction="none")[1]
            assert found[0] == pytest.approx(float((each * weights).sum()))
    small = plain(net, HomoskedasticGaussian(total - 0.5, scale=0.5))
    with pytest.raises(ValueError, match="the sum of their weights"):
        small.fit([(x, y, weights)], STILL, 1)


# --- curvature ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_weights_of_classes_count_alike_for_labels_of_any_shape(structure, curvature):
    x, y, net = torch.randn(N, 2), torch.randint(3, (N,)), nn.Linear(2, 3)
    likelihood = Categorical(2 * N, class_weights=torch.tensor([0.5, 2.0, 1.5]))
    found = []
    for inner, targets in ((net, y), (nn.Sequential(net, nn.Unflatten(1, (1, 3))), y[:, None])):
        bnn = tyxe.LaplaceBNN(inner, PRIOR, likelihood, structure=structure, curvature=curvature)
        bnn.fit_curvature([(x, targets)])
        curve = bnn.state.curvature
        found.append(curve.operator.to_dense() * curve.points)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_the_curvature_of_several_outputs_counts_what_each_part_does(structure, curvature):
    x, net = torch.randn(N, 2), Two()
    y = {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}
    kept = torch.rand(N) < 0.4
    y["k"][~kept] = -100
    how = {"structure": structure, "curvature": curvature}
    bnn = tyxe.LaplaceBNN(net, PRIOR, joint(ignore_index=-100), **how)
    bnn.fit_curvature([(x, y)])
    alone = tyxe.LaplaceBNN(net.k, PRIOR, Categorical(int(kept.sum())), **how)
    alone.fit_curvature([(x[kept], y["k"][kept])])
    expected = alone.state.curvature.operator.to_dense()
    size = len(expected)
    if structure != "kron":
        found = bnn.state.curvature.operator.to_dense()[:size, :size]
        torch.testing.assert_close(found, expected)
    assert bnn.state.curvature.num_targets == N + int(kept.sum())


def test_a_process_of_points_counts_weights_as_the_linearised_net_does():
    x, y, weights = torch.randn(9, 2), torch.randint(3, (9,)), torch.arange(9).double() % 3
    net, size = nn.Linear(2, 3), int(weights.sum())
    bnn = tyxe.LaplaceBNN(net, PRIOR, Categorical(size), structure="full")
    bnn.fit_curvature([(x, y, weights)])
    bnn.fit_gp([(x, y, weights)])
    new = torch.randn(4, 2)
    torch.testing.assert_close(bnn._gp(new)[1], bnn._glm(new)[1])


# --- several outputs, several members -----------------------------------------------------------


def test_members_with_a_likelihood_of_several_outputs_each():
    x, y = torch.randn(N, 2), {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}
    ensemble = tyxe.EnsembleBNN(lambda seed: plain(Two(seed), joint()), 2)
    _, together = ensemble.evaluate(x, y)
    each = [member.evaluate([(x, y)], reduction="none")[1]["joint"] for member in ensemble.members]
    expected = (torch.stack(each).exp().mean(0)).log().sum()
    torch.testing.assert_close(together["joint"], expected)
    again = tyxe.EnsembleBNN(lambda seed: plain(Two(seed), joint()), 2)
    again.fit([(x, y)], torch.optim.Adam, 1, vectorize=True, progress=False)


def test_a_laplace_approximation_of_several_outputs_takes_loaders_of_mappings():
    x, y = torch.randn(N, 2), {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}
    bnn = tyxe.LaplaceBNN(Two(), PRIOR, joint(), structure="full")
    bnn.fit_curvature([(x, y)])
    assert float(bnn.optimize_prior_precision(loader=[(x, y)])) > 0
    bnn.fit_gp([(x, y)])
    torch.testing.assert_close(bnn._gp(x[:4])[1], bnn._glm(x[:4])[1])


def test_scores_of_draws_of_each_member():
    x, y = torch.randn(N, 2), torch.randn(N, 1)

    def member(index):
        likelihood = HomoskedasticGaussian(N, scale=0.5)
        if not index:
            return tyxe.VariationalBNN(nn.Linear(2, 1), PRIOR, likelihood, tyxe.guides.AutoNormal)
        found = tyxe.LaplaceBNN(nn.Linear(2, 1), PRIOR, likelihood)
        found.fit_curvature([(x, y)])
        return found

    ensemble = tyxe.EnsembleBNN(member, 2)
    torch.manual_seed(0)
    error, log_likelihood = ensemble.evaluate(x, y, num_predictions=3, aggregate=False)
    assert error.shape == log_likelihood.shape == (4,)
    torch.manual_seed(0)
    first = ensemble.members[0].evaluate(x, y, num_predictions=3, aggregate=False)
    torch.testing.assert_close(log_likelihood[:3], first[1])
    torch.testing.assert_close(log_likelihood[3], ensemble.members[1].evaluate(x, y)[1])


@pytest.mark.parametrize("kind", [Categorical, Poisson])
def test_a_reference_is_compared_with_the_weighted_mixture(kind):
    x, outputs = torch.randn(6, 2), 3 if kind is Categorical else 1
    chains = tyxe.MCMC_BNN(nn.Linear(2, outputs), PRIOR, kind(6), tyxe.samplers.HMC)
    y = torch.zeros(6).long() if kind is Categorical else torch.ones(6, 1)
    chains.fit([(x, y)], 20, warmup_steps=200, num_chains=2, progress=False)
    known = reference(chains, x, largest_r_hat=9.0)
    torch.manual_seed(0)

    def member(_):
        return plain(tyxe.util.reset_parameters_(nn.Linear(2, outputs)), kind(6))

    ensemble = tyxe.EnsembleBNN(member, 2, weights=[1.0, 0.0])
    expected = known.compare(ensemble.members[0], num_predictions=4)
    assert known.compare(ensemble, num_predictions=4) == pytest.approx(expected)


def test_weights_of_draws_are_repeated_draws():
    weights, counts = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([2, 1, 1])
    draws = torch.randn(3, 5, 4)
    repeated = draws.repeat_interleave(counts, 0)
    for decompose in (predictive.variance_decomposition, predictive.entropy_decomposition):
        found = decompose(draws.softmax(-1), weights)
        torch.testing.assert_close(found, decompose(repeated.softmax(-1)))
    found = predictive.regression_decomposition(draws, 0.3, weights)
    torch.testing.assert_close(found, predictive.regression_decomposition(repeated, 0.3))
    other = torch.randn(7, 5, 4)
    torch.testing.assert_close(wasserstein2(draws, other, weights), wasserstein2(repeated, other))
    with pytest.raises(ValueError, match="weights has shape"):
        wasserstein2(draws, other, weights[:2])


def test_targets_say_what_does_not_fit():
    y = Targets(torch.zeros(4, 2), mask=torch.ones(4, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"the mask has shape \(4, 3\)"):
        y.masked(torch.ones(4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask whole points"):
        y.counts_within(torch.Size([4, 3]))
