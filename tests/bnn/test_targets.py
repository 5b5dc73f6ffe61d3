"""Right values of what has weights, masks and holes, of other targets, and of several outputs."""

import functools

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, laplace, mean_field, plain
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

pytestmark = pytest.mark.usefixtures("double")
STILL = functools.partial(torch.optim.SGD, lr=0.0)
N = 40


def noise(size=N):
    return HomoskedasticGaussian(size, scale=0.5)


def fit_of(bnn, *loader):
    """Return the log-likelihood that a fit of no steps reports."""
    return bnn.fit([*loader], STILL, 1).log_likelihood[0]


def pairs():
    return {"k": torch.randint(3, (N,)), "s": torch.randn(N, 1)}


def curvature_of(net, likelihood, *loader, **how):
    return laplace(net, likelihood, [*loader], **how).state.curvature


def summed(*given, **how):
    """Return the curvature over all points, dense."""
    found = curvature_of(*given, **how)
    return found.operator.to_dense() * found.points


class Two(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.k, self.s = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, x):
        return {"k": self.k(x), "s": self.s(x)}


def joint(size=N, weights=None, **options):
    return Joint(weights=weights, k=Categorical(size, **options), s=noise(size))


# --- holes within points ------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 4])
def test_numbers_that_are_missing_count_nowhere(batches):
    x, y, net = torch.randn(N, 2), torch.randn(N, 3), nn.Linear(2, 3)
    kept = torch.rand(N, 3) < 0.6
    kept[:, 0] = True
    holes = y.where(kept, torch.nan)
    loader = list(zip(x.chunk(batches), holes.chunk(batches), strict=True))
    bnn, z = plain(net, noise()), (y - net(x).detach())[kept]
    found = scores(bnn, loader, num_predictions=0)
    assert found["RMSE"] == pytest.approx(float(z.square().mean().sqrt()))
    factor = ScaleFactor().wrap(bnn, loader, num_predictions=0).calibrator.factor
    assert factor == pytest.approx(float((z / 0.5).square().mean().sqrt()))
    each = torch.distributions.Normal(0.0, 0.5).log_prob(z).sum()
    torch.testing.assert_close(bnn.evaluate(loader)[1], each)
    assert fit_of(bnn, *loader) == pytest.approx(float(each))
    far = (y - net(x).detach()).abs().where(kept, 0.0).amax(1) / 0.5
    held = SplitConformal(level=0.7).wrap(bnn, loader, num_predictions=0)
    assert held.calibrator.threshold == pytest.approx(float(far.sort().values[28]))


def test_holes_of_some_batches_alone():
    """Chains and members that go through batches in orders of their own, some with holes."""
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    y[3] = torch.nan
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, 10, shuffle=True)
    chains = tyxe.MCMC_BNN(nn.Linear(2, 1), NORMAL, noise(), tyxe.samplers.SGLD(lr=1e-3))
    chains.fit(loader, 12, warmup_steps=4, num_chains=3, progress=False)
    assert bool(chains.get_samples()["net.weight"].isfinite().all())
    members = tyxe.EnsembleBNN(lambda _: plain(nn.Linear(2, 1), noise()), 3)
    histories = members.fit(loader, torch.optim.Adam, 3, vectorize=True, progress=False)
    assert all(torch.tensor(h.loss).isfinite().all() for h in histories)


def test_a_fit_of_nothing_warns():
    y = torch.full((N, 1), torch.nan)
    bnn = plain(nn.Linear(2, 1), Poisson(N))
    with pytest.warns(tyxe.TyxeWarning, match="no point of an epoch counts"):
        bnn.fit([(torch.randn(N, 2), y)], STILL, 1)
    chains = tyxe.MCMC_BNN(nn.Linear(2, 1), NORMAL, Poisson(N), tyxe.samplers.HMC)
    with pytest.raises(ValueError, match="no point"):
        chains.fit([(torch.randn(N, 2), y)], 1, warmup_steps=0)


def test_integers_as_a_third_element_name_unpack():
    with pytest.warns(tyxe.TyxeWarning, match=r"integers, .* unpack=lambda batch: batch\[:2\]"):
        weighted(torch.zeros(3), torch.arange(3))
    x, y, weights = torch.randn(N, 2), torch.randn(N, 1), torch.arange(N) % 3
    bnn = plain(nn.Linear(2, 1), noise())
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
    assert fit_of(bnn, (x, q)) == pytest.approx(float(right))
    error, log_likelihood = bnn.evaluate(x, q)
    torch.testing.assert_close(log_likelihood, right)
    torch.testing.assert_close(error, (1 - q.gather(1, logits.argmax(1)[:, None])).sum())
    labels = torch.randint(3, (N,))
    one_hot = nn.functional.one_hot(labels, 3).double()
    for kind in ("ggn", "empirical"):
        found = (summed(net, Categorical(N), (x, y), curvature=kind) for y in (labels, one_hot))
        torch.testing.assert_close(*found)
    for wrong in (2 * q, torch.cat([q[:, :1] - 1, q[:, 1:] + 0.5], 1)):
        with pytest.raises(ValueError, match="expected probabilities of the classes"):
            bnn.evaluate(x, wrong)
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
        assert fit_of(bnn, *loader) == pytest.approx(float(right))
    torch.testing.assert_close(bnn.evaluate(x, y)[1], -loss(logits, y, reduction="sum"))
    holes = y.masked_fill(torch.rand(shape) < 0.2, torch.nan)
    each = loss(logits, holes.nan_to_num(0.0), pos_weight=weight, reduction="none")
    ((_, found),) = bnn._to_fit([(x, holes)])
    found = bnn.likelihood.log_likelihood(logits, found, "sum")
    torch.testing.assert_close(found, -each[~holes.isnan()].sum())
    expected = torch.autograd.functional.hessian(
        lambda w: loss((x @ w.view(2, size)).view(shape), y, pos_weight=weight, reduction="sum"),
        torch.zeros(2 * size),
    )
    bare = nn.Linear(2, size, bias=False)
    nn.init.zeros_(bare.weight)
    inner = bare if len(shape) > 1 else nn.Sequential(bare, nn.Flatten(0))
    found = curvature_of(inner, Bernoulli(N, pos_weight=weight), (x, y), structure="full")
    order = torch.arange(2 * size).view(2, size).mT.flatten()
    torch.testing.assert_close(found.operator.to_dense(), expected[order][:, order])


# --- several outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("holes", [False, True])
def test_tasks_count_by_their_weights_in_fits(holes):
    x, net, y = torch.randn(N, 2), Two(), pairs()
    if holes:
        y["s"][:7] = torch.nan
    weights = {"k": 0.25, "s": 3.0}
    each = plain(net, joint()).evaluate([(x, y)])[1]
    right = sum(weights[name] * each[name] for name in weights)
    bnn = plain(net, joint(weights=weights))
    assert fit_of(bnn, (x, y)) == pytest.approx(float(right))
    torch.testing.assert_close(bnn.evaluate([(x, y)])[1], each)
    for structure in ("full", "diag"):
        k, s, both = (
            summed(net, joint(weights=of), (x, y), structure=structure)
            for of in ({"s": 0.0}, {"k": 0.0}, weights)
        )
        torch.testing.assert_close(both, 0.25 * k + 3 * s)


def test_weights_of_parts_count_in_fits_of_a_joint():
    x, net = torch.randn(N, 2), Two()
    y = pairs()
    classes = torch.tensor([0.5, 2.0, 1.5])
    each = plain(net, joint()).evaluate([(x, y)], reduction="none")[1]
    right = (classes[y["k"]] * each["k"] + each["s"]).sum()
    bnn = plain(net, joint(class_weights=classes))
    assert fit_of(bnn, (x, y)) == pytest.approx(float(right))


def test_probabilities_are_a_part_of_a_joint():
    x, bnn = torch.randn(N, 2), plain(Two(), joint())
    q, numbers = torch.randn(N, 3).softmax(-1), torch.randn(N, 1)

    def scored(labels, **how):
        return bnn.evaluate([(x, {"k": labels, "s": numbers})], **how)[1]

    each = (scored(torch.full((N,), c), reduction="none")["k"] for c in range(3))
    right = sum(q[:, c] * one for c, one in enumerate(each)).sum()
    found = scored(q)
    torch.testing.assert_close(found["k"], right)
    assert fit_of(bnn, (x, {"k": q, "s": numbers})) == pytest.approx(float(found["joint"]))
    drawn = bnn.sample_predictive(x, num_samples=4)
    assert drawn["k"].shape == (4, N, 3)
    assert bool((drawn["k"].sum(-1) == 1).all())
    assert drawn["s"].shape == (4, N, 1)


@pytest.mark.parametrize("weights", [None, [0.8, 0.2]])
def test_probabilities_are_a_part_of_a_joint_in_ensembles(weights):
    x, q = torch.randn(N, 2), torch.randn(N, 3).softmax(-1)
    data = [(x, {"k": q, "s": torch.randn(N, 1)})]
    ensemble = tyxe.EnsembleBNN(lambda seed: plain(Two(seed), joint()), 2, weights=weights)
    ensemble.fit(data, torch.optim.Adam, 1, progress=False)
    found = ensemble.evaluate(data, reduction="none")[1]
    right = (q * ensemble.predict(x)["k"].log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found["k"], right)


def test_numbers_of_a_censored_part_are_drawn():
    x, numbers = torch.randn(N, 2), censored_targets(torch.randn(N, 1))
    bnn = plain(Two(), Joint(k=Categorical(N), s=Censored(noise())))
    fit_of(bnn, (x, {"k": torch.zeros(N, dtype=torch.long), "s": numbers}))
    assert bnn.sample_predictive(x, num_samples=4)["s"].shape == (4, N, 1)
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
    x, y, net = torch.randn(N, 2), torch.randn(N, 1), nn.Linear(2, 1)
    weights = torch.rand(N) + 0.1
    total = float(weights.sum())
    bnn = plain(net, noise(total))
    assert bnn.likelihood.dataset_size == pytest.approx(total)
    each = bnn.evaluate(x, y, reduction="none")[1]
    assert fit_of(bnn, (x, y, weights)) == pytest.approx(float((each * weights).sum()))
    with pytest.raises(ValueError, match="the sum of their weights"):
        fit_of(plain(net, noise(total - 0.5)), (x, y, weights))


# --- curvature ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_weights_of_classes_count_alike_for_labels_of_any_shape(structure, curvature):
    x, y, net = torch.randn(N, 2), torch.randint(3, (N,)), nn.Linear(2, 3)
    likelihood = Categorical(2 * N, class_weights=torch.tensor([0.5, 2.0, 1.5]))
    how = {"structure": structure, "curvature": curvature}
    one_position = nn.Sequential(net, nn.Unflatten(1, (1, 3)))
    found = summed(net, likelihood, (x, y), **how)
    torch.testing.assert_close(summed(one_position, likelihood, (x, y[:, None]), **how), found)


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_the_curvature_of_several_outputs_counts_what_each_part_does(structure, curvature):
    x, net, y = torch.randn(N, 2), Two(), pairs()
    kept = torch.rand(N) < 0.4
    y["k"][~kept] = -100
    how = {"structure": structure, "curvature": curvature}
    both = curvature_of(net, joint(ignore_index=-100), (x, y), **how)
    alone = curvature_of(net.k, Categorical(int(kept.sum())), (x[kept], y["k"][kept]), **how)
    expected = alone.operator.to_dense()
    if structure != "kron":
        size = len(expected)
        torch.testing.assert_close(both.operator.to_dense()[:size, :size], expected)
    assert both.num_targets == N + int(kept.sum())


def test_a_process_of_points_counts_weights_as_the_linearised_net_does():
    x, y, weights = torch.randn(9, 2), torch.randint(3, (9,)), torch.arange(9).double() % 3
    net, size = nn.Linear(2, 3), int(weights.sum())
    bnn = laplace(net, Categorical(size), [(x, y, weights)], structure="full")
    bnn.fit_gp([(x, y, weights)])
    new = torch.randn(4, 2)
    torch.testing.assert_close(bnn._gp(new)[1], bnn._glm(new)[1])


def test_a_laplace_approximation_of_several_outputs_takes_loaders_of_mappings():
    x, y = torch.randn(N, 2), pairs()
    bnn = laplace(Two(), joint(), [(x, y)], structure="full")
    assert float(bnn.optimize_prior_precision("grid", [(x, y)], grid=[0.5, 2.0])) > 0
    bnn.fit_gp([(x, y)])
    torch.testing.assert_close(bnn._gp(x[:4])[1], bnn._glm(x[:4])[1])


# --- several outputs, several members -----------------------------------------------------------


def test_members_with_a_likelihood_of_several_outputs_each():
    x, y = torch.randn(N, 2), pairs()
    ensemble = tyxe.EnsembleBNN(lambda seed: plain(Two(seed), joint()), 2)
    _, together = ensemble.evaluate(x, y)
    each = [member.evaluate([(x, y)], reduction="none")[1]["joint"] for member in ensemble.members]
    expected = (torch.stack(each).exp().mean(0)).log().sum()
    torch.testing.assert_close(together["joint"], expected)
    again = tyxe.EnsembleBNN(lambda seed: plain(Two(seed), joint()), 2)
    again.fit([(x, y)], torch.optim.Adam, 1, vectorize=True, progress=False)


def test_scores_of_draws_of_each_member():
    x, y = torch.randn(N, 2), torch.randn(N, 1)

    def member(index):
        if not index:
            return mean_field(nn.Linear(2, 1), noise())
        return laplace(nn.Linear(2, 1), noise(), [(x, y)])

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
    kernel = tyxe.samplers.HMC(0.01, adapt_step_size=False, adapt_mass_matrix=False)
    chains = tyxe.MCMC_BNN(nn.Linear(2, outputs), NORMAL, kind(6), kernel)
    y = torch.zeros(6).long() if kind is Categorical else torch.ones(6, 1)
    chains.fit([(x, y)], 20, warmup_steps=0, num_chains=2, compile=False, progress=False)
    known = reference(chains, x, largest_r_hat=1e9)
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
