"""Censored targets, and ordinal ones, against integrals, finite differences and other libraries."""

import functools
import math

import pyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles.nets import NetOf
from tyxe.calibration import ScaleFactor, SplitConformal, coverage
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Censored,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    censored_targets,
    log_tails,
)
from tyxe.predictive.scores import expected_variance

INF = math.inf
F = torch.tensor([-1.2, 0.3, 2.0], dtype=torch.float64)
ENDS = torch.tensor(
    [[-1.0, 1.0], [0.4, 0.4], [0.5, INF], [-INF, 0.3], [2.0, 2.5], [-INF, INF]],
    dtype=torch.float64,
)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def every_pair():
    """Return each prediction with each target, `(18,)` and `(18, 2)`."""
    return F.repeat_interleave(len(ENDS)), ENDS.repeat(len(F), 1)


class LogNormal(Likelihood):
    """Durations; the net returns the mean of their logarithm."""

    def predictive_distribution(self, predictions, latents=None):
        return dist.LogNormal(predictions, 0.6, validate_args=False)

    def point_error(self, predictions, targets):
        return (predictions.exp() - targets).square()

    def aggregate_predictions(self, predictions, dim=0, latents=None, weights=None):
        return predictions.mean(dim)


class Durations(LogNormal):
    def predictive_distribution(self, predictions, latents=None):
        return dist.Exponential(predictions.exp(), validate_args=False)


class Gumbel(LogNormal):
    def predictive_distribution(self, predictions, latents=None):
        return dist.Gumbel(predictions, torch.full_like(predictions, 0.7), validate_args=False)


BASES = {
    "Gaussian": (lambda n: HomoskedasticGaussian(n, scale=0.7), lambda f: scipy.stats.norm(f, 0.7)),
    "LogNormal": (LogNormal, lambda f: scipy.stats.lognorm(0.6, scale=math.exp(f))),
    "Exponential": (Durations, lambda f: scipy.stats.expon(scale=math.exp(-f))),
    "Gumbel": (Gumbel, lambda f: scipy.stats.gumbel_r(f, 0.7)),
}


@pytest.mark.parametrize(("base", "oracle"), BASES.values(), ids=BASES)
def test_an_interval_has_the_integral_of_the_density(base, oracle):
    f, pairs = every_pair()
    actual = Censored(base(18)).log_likelihood(f, pairs).exp()
    for found, one, (lower, upper) in zip(actual.tolist(), f.tolist(), pairs.tolist(), strict=True):
        known = oracle(one)
        ends = max(lower, known.ppf(1e-13)), min(upper, known.isf(1e-13))
        expected = 0.0
        if lower == upper:
            expected = known.pdf(lower)
        elif ends[0] < ends[1]:
            points = known.ppf([0.01, 0.5, 0.99])
            expected, _ = scipy.integrate.quad(known.pdf, *ends, points=points, limit=200)
        assert found == pytest.approx(expected, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("name", ["LogNormal", "Exponential"])
@pytest.mark.parametrize("pair", [(-INF, -1.0), (-2.0, -1.0), (-1.0, -1.0), (INF, INF)])
def test_intervals_outside_of_the_support_have_no_probability(name, pair):
    likelihood = Censored(BASES[name][0](2))
    found = likelihood.log_likelihood(torch.zeros(2), torch.tensor([pair, (-1.0, INF)]))
    assert found.tolist() == [-INF, 0.0]


@pytest.mark.parametrize("name", BASES)
def test_gradients_of_all_kinds_of_targets_are_those_of_differences(name):
    f, pairs = every_pair()
    likelihood = Censored(BASES[name][0](18))
    f.requires_grad_()
    value = functools.partial(likelihood.log_likelihood, targets=pairs)
    assert torch.autograd.gradcheck(value, f)
    assert torch.autograd.gradgradcheck(value, f)


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (20.0, 21.0, scipy.stats.norm.logsf(20.0)),
        (-21.0, -20.0, scipy.stats.norm.logsf(20.0)),
        (30.0, INF, scipy.stats.norm.logsf(30.0)),
        (-INF, -30.0, scipy.stats.norm.logsf(30.0)),
        (0.0, 1e-7, scipy.stats.norm.logpdf(0.0) + math.log(1e-7)),
        (20.0, 20.0 + 2**-19, scipy.stats.norm.logpdf(20.0) - 19 * math.log(2)),
        (-INF, 30.0, 0.0),
    ],
)
def test_tails_and_narrow_intervals_in_single_precision(lower, upper, expected):
    likelihood = Censored(HomoskedasticGaussian(1, scale=1.0))
    f = torch.zeros(1, 1, requires_grad=True)
    found = likelihood.log_likelihood(f, torch.tensor([[[lower, upper]]]), "sum")
    found.backward()
    # The mass within (20, 21) is that above 20, but for a share of 1e-9.
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert bool(f.grad.isfinite().all())


def test_a_gaussian_has_the_hessian_of_each_target():
    x, y = torch.randn(18, 2).double(), every_pair()[1][:, None]
    net = nn.Linear(2, 1).double()
    likelihood = Censored(HomoskedasticGaussian(18, scale=0.7))

    def loss(vector):
        outputs = x @ vector[:2, None] + vector[2]
        return -likelihood.log_likelihood(outputs, y, "sum")

    weights = torch.cat([net.weight[0], net.bias]).detach()
    expected = torch.autograd.functional.hessian(loss, weights)
    of_structure = {"full": lambda h: h, "diag": torch.diagonal, "kron": lambda h: h[-1, -1]}
    for structure, part in of_structure.items():
        bnn = tyxe.LaplaceBNN(net, PRIOR, likelihood, structure=structure)
        bnn.fit_curvature([(x[:7], y[:7]), (x[7:], y[7:])])
        found = bnn.state.curvature.operator.to_dense()
        torch.testing.assert_close(part(found), part(expected))


def test_a_curvature_of_part_of_a_joint():
    x, pairs = torch.randn(18, 2).double(), every_pair()[1][:, None]
    net, part = nn.Linear(2, 1).double(), Censored(HomoskedasticGaussian(18, scale=0.7))
    two = NetOf(lambda own, x: {"a": own.net(x), "b": own.net(x)}, net=net)
    joint = Joint(a=part, b=Poisson(18), weights={"b": 0})
    found = []
    for inner, likelihood, y in (
        (net, part, pairs),
        (two, joint, {"a": pairs, "b": torch.ones(18, 1)}),
    ):
        bnn = tyxe.LaplaceBNN(inner, PRIOR, likelihood)
        bnn.fit_curvature([(x, y)])
        found.append(bnn.state.curvature.operator.to_dense())
    torch.testing.assert_close(*found)


def test_censored_targets_are_made_of_bounds():
    y = torch.tensor([1.0, 2.0, torch.nan])
    marked = torch.tensor([True, False, False])
    pairs = censored_targets(y, left=marked, right=torch.tensor([False, True, False]))
    assert pairs[:2].tolist() == [[-INF, 1.0], [2.0, INF]]
    likelihood = Censored(HomoskedasticGaussian(3, scale=1.0))
    found = likelihood.log_likelihood(torch.zeros(3, 1), pairs[:, None], "none")
    expected = [scipy.stats.norm.logcdf(1.0), scipy.stats.norm.logsf(2.0), 0.0]
    torch.testing.assert_close(found, torch.tensor(expected).float())
    outside = likelihood.error(torch.tensor([[3.0], [3.0], [3.0]]), pairs[:, None])
    assert outside.tolist() == [4.0, 0.0, 0.0]


def test_a_fit_finds_the_mean_that_censoring_hides():
    x = torch.ones(1000, 1)
    y = 1.0 + 0.5 * torch.randn(1000, 1)
    pairs = censored_targets(y.clamp(max=1.2), right=y > 1.2)
    likelihood = Censored(HomoskedasticGaussian(1000, scale=1.0, learn_scale=True))
    bnn = tyxe.VariationalBNN(nn.Linear(1, 1, bias=False), PRIOR, likelihood, AutoDelta)
    bnn.fit([(x, pairs)], functools.partial(torch.optim.Adam, lr=0.1), 60, progress=False)
    mean, spread = bnn.predict(x[:1])
    # Standard errors are .016 and .013 where all numbers are known, and larger here.
    assert float(mean) == pytest.approx(1.0, abs=0.06)
    assert float(spread) == pytest.approx(0.5, abs=0.06)
    assert bnn.sample_predictive(x[:5], num_samples=7).shape == (7, 5, 1)
    lower, upper = bnn.interval(x[:5])
    assert lower.shape == upper.shape == (5, 1)


def test_the_predictive_distribution_of_a_linearised_net_is_that_of_the_numbers():
    x, pairs = torch.randn(18, 2).double(), every_pair()[1][:, None]
    base = HomoskedasticGaussian(18, scale=0.7)
    found = []
    for likelihood, y in ((Censored(base), pairs), (base, pairs.mean(-1).nan_to_num(0, 1, 1))):
        net = nn.Linear(2, 1).double()
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        bnn = tyxe.LaplaceBNN(net, PRIOR, likelihood)
        bnn.fit_curvature([(x, y)])
        found.append(bnn.predictive(x, predictive="glm", num_predictions=0))
        assert found[-1].batch_shape == (18,)
    torch.testing.assert_close(found[0].mean, found[1].mean)
    torch.testing.assert_close(found[0].stddev, found[1].stddev)


def test_tails_without_a_formula_are_those_of_the_cdf():
    halved = torch.distributions.HalfNormal(1.0)
    below, above = log_tails(torch.distributions.Gumbel(0.0, 1.0), torch.tensor(0.3))
    assert float(below.exp() + above.exp()) == pytest.approx(1.0)
    below, above = log_tails(halved, torch.tensor([0.0, 50.0]))
    assert bool(below.isfinite().all() & above.isfinite().all())
    falling = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(0.0, -2.0)]
    )
    below, above = log_tails(falling, torch.tensor(1.0))
    assert float(below) == pytest.approx(scipy.stats.norm.logcdf(0.5))
    assert float(above) == pytest.approx(scipy.stats.norm.logsf(0.5))


def test_what_draws_or_linearises_labels_refuses_censored_ones():
    data = [(torch.randn(18, 2).double(), every_pair()[1][:, None])]
    likelihood = Censored(HomoskedasticGaussian(18, scale=0.7))
    bnn = tyxe.VariationalBNN(nn.Linear(2, 1).double(), PRIOR, likelihood, tyxe.guides.AutoNormal)
    refused = pytest.raises(TypeError, match="curvature='hessian' or 'empirical'")
    with refused, tyxe.poutine.variational_laplace():
        bnn.fit(data, torch.optim.Adam, 1, progress=False)
    with tyxe.poutine.variational_laplace("hessian"):
        bnn.fit(data, torch.optim.Adam, 1, progress=False)
    laplace = tyxe.LaplaceBNN(nn.Linear(2, 1).double(), PRIOR, likelihood, structure="full")
    laplace.fit(data, torch.optim.Adam, 1, progress=False)
    with pytest.raises(TypeError, match="refine takes no censored targets"):
        laplace.refine(data)


@pytest.mark.parametrize("of_tasks", [False, True])
def test_variational_laplace_refuses_weights_within_points(of_tasks):
    x, y = torch.randn(6, 2), (torch.arange(6) % 2)[:, None].float()
    net, likelihood = nn.Linear(2, 1), Bernoulli(6, pos_weight=2.0)
    if of_tasks:
        net, y = NetOf(lambda own, x: {"a": own.net(x)}, net=net), {"a": y}
        likelihood = Joint(a=Bernoulli(6), weights={"a": 2.0})
    bnn = tyxe.VariationalBNN(net, PRIOR, likelihood, tyxe.guides.AutoNormal)
    refused = pytest.raises(ValueError, match="counts each point once")
    with refused, tyxe.poutine.variational_laplace():
        bnn.fit([(x, y)], torch.optim.Adam, 1, progress=False)


def test_classes_in_an_order_are_differences_of_sigmoids():
    likelihood = Ordinal(4, 5, cut_points=torch.tensor([-2.0, -1.9, 0.5, 3.0])).double()
    f = torch.randn(4, 1, dtype=torch.float64) * 3
    found = likelihood.predictive_distribution(f).probs
    torch.testing.assert_close(found.sum(-1), torch.ones(4).double())
    cuts = torch.cat([torch.tensor([-INF]), likelihood.cut_points.detach(), torch.tensor([INF])])
    torch.testing.assert_close(found, (cuts - f).sigmoid().diff())
    f.requires_grad_()
    assert torch.autograd.gradcheck(likelihood.class_logits, f)
    far = likelihood.float().class_logits(torch.tensor([[200.0], [-200.0]]))
    assert bool(far.isfinite().all())


def test_gradients_of_cut_points_are_those_of_differences():
    likelihood, f = Ordinal(6, 4).double(), torch.randn(6, 1, dtype=torch.float64)
    y = torch.arange(6) % 4

    def value(first, gaps):
        state = {"first_cut": first, "log_gaps": gaps}
        return torch.func.functional_call(likelihood, state, (f, y))

    likelihood.forward = functools.partial(likelihood.log_likelihood, reduction="sum")
    given = [p.detach().clone().requires_grad_() for p in likelihood.parameters()]
    assert torch.autograd.gradcheck(value, given)


def test_a_fit_learns_cut_points():
    x = torch.randn(1000, 1)
    truth = Ordinal(1000, 3, cut_points=torch.tensor([-1.5, 0.5]))
    y = truth.sample(2.0 * x).float()
    y[::50] = torch.nan
    bnn = tyxe.VariationalBNN(nn.Linear(1, 1, bias=False), PRIOR, Ordinal(1000, 3), AutoDelta)
    bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 80, progress=False)
    # Standard errors are about .11.
    cuts = bnn.likelihood.cut_points.detach()
    torch.testing.assert_close(cuts, truth.cut_points.detach(), rtol=0, atol=0.4)
    predictions = bnn.predict(x)
    assert predictions.shape == (1000, 3)
    torch.testing.assert_close(predictions.exp().sum(-1), torch.ones(1000))
    found = tyxe.diagnostics.scores(bnn, [(x, y)], 1)
    assert 0.2 < found["error"] < 0.45
    assert "Brier score" in found
    lower, upper = bnn.interval(x[:5])
    assert bool((lower <= upper).all())


def test_ordinal_under_all_kinds_of_inference():
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    for structure in ("full", "kron"):
        laplace = tyxe.LaplaceBNN(nn.Linear(2, 1), PRIOR, Ordinal(12, 3), structure=structure)
        laplace.fit([(x, y)], torch.optim.Adam, 2, progress=False)
        assert laplace.predict(x, num_predictions=20).shape == (12, 3)
        assert bool(laplace.evaluate(x, y)[1].isfinite())
    with pytest.raises(ValueError, match="first_cut, log_gaps"):
        tyxe.MCMC_BNN(nn.Linear(2, 1), PRIOR, Ordinal(12, 3), tyxe.samplers.HMC())
    fixed = Ordinal(12, 3).requires_grad_(False)
    kernel = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False, step_size=0.1)
    chains = tyxe.MCMC_BNN(nn.Linear(2, 1), PRIOR, fixed, kernel)
    chains.fit([(x, y)], 3, warmup_steps=2, num_chains=1, compile=False, progress=False)
    assert chains.predict(x).shape == (12, 3)
    scaled = tyxe.calibration.SplitConformal(level=0.5).wrap(laplace, [(x, y)])
    assert scaled.predict(x).shape == (12, 3)


def test_densities_are_those_of_scipy():
    f = torch.randn(5, 2, dtype=torch.float64)
    y = 3 * torch.randn(5, 2, dtype=torch.float64)
    found = StudentT(5, scale=0.7, df=3.5).log_likelihood(f, y)
    expected = torch.tensor(scipy.stats.t.logpdf(y, 3.5, f, 0.7)).sum(1)
    torch.testing.assert_close(found, expected)
    counts = torch.arange(10).view(5, 2)
    found = NegativeBinomial(5, total_count=2.5).log_likelihood(f, counts)
    chance = 2.5 / (2.5 + f.exp())
    expected = torch.tensor(scipy.stats.nbinom.logpmf(counts, 2.5, chance)).sum(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [StudentT, NegativeBinomial])
def test_own_parameters_are_learned_or_drawn(make):
    own = "scale" if make is StudentT else "total_count"
    learned = make(4, 2.0, **{f"learn_{own}": True})
    assert [name for name, _ in learned.named_parameters()] == ["log_noise"]
    drawn = make(4, dist.LogNormal(0.0, 1.0))
    f, y = torch.zeros(4, 2), torch.ones(4, 2)
    torch.testing.assert_close(
        drawn.log_likelihood(f, y, latents={own: torch.tensor(2.0)}), learned.log_likelihood(f, y)
    )
    with pytest.raises(ValueError, match="is inferred, and its prior alone"):
        drawn.log_likelihood(f, y)
    with pytest.raises(ValueError, match=rf"{own} is -1; expected positive numbers"):
        make(4, -1.0)
    with pytest.raises(ValueError, match="is a distribution, so it is inferred"):
        make(4, dist.LogNormal(0.0, 1.0), **{f"learn_{own}": True})
    with pytest.raises(ValueError, match=r"has shape \(3,\) and predictions have shape \(4, 2\)"):
        make(4, torch.ones(3)).log_likelihood(f, y)


def test_the_prior_of_an_inferred_count_says_nothing_of_a_standard_deviation():
    likelihood = NegativeBinomial(60, total_count=dist.LogNormal(0.0, 1.0))
    predictions = torch.tensor([[4.0], [9.0]], dtype=torch.float64).log()
    with pytest.raises(ValueError, match="is inferred, and its prior alone"):
        likelihood.mean_and_scale(predictions)
    found = likelihood.mean_and_scale(predictions, {"total_count": torch.tensor(5.0)})
    mean = predictions.exp()
    torch.testing.assert_close(found, (mean, (mean + mean.square() / 5).sqrt()))
    bnn = tyxe.VariationalBNN(nn.Linear(2, 1), PRIOR, likelihood, AutoNormal, AutoNormal)
    loader = [(torch.randn(60, 2), torch.randn(60, 1).exp().round())]
    # Intervals hold targets for any scale.
    sets = SplitConformal(level=0.8).wrap(bnn, loader, num_predictions=0)
    assert 0.8 <= coverage(sets.predict(loader[0][0]), loader[0][1]) < 0.9
    with pytest.raises(ValueError, match="is inferred, and its prior alone"):
        ScaleFactor().wrap(bnn, loader)


@pytest.mark.parametrize("count", [1e2, 1e5, 1e7, 1e12, INF])
def test_nearly_poisson_counts_keep_their_density_in_single_precision(count):
    likelihood = NegativeBinomial(10, total_count=dist.HalfCauchy(1.0))
    f, y = torch.linspace(-3.0, 4.0, 10), torch.arange(10)
    latents = {"total_count": torch.tensor(count, requires_grad=True)}
    found = likelihood.log_likelihood(f, y, latents=latents)
    mean = f.double().exp().numpy()
    expected = torch.tensor(scipy.stats.poisson.logpmf(y, mean))
    if count < 1e7:
        expected = torch.tensor(scipy.stats.nbinom.logpmf(y, count, count / (count + mean)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool(likelihood.predictive_distribution(f, latents).stddev.isfinite().all())
    (gradient,) = torch.autograd.grad(found.sum(), latents["total_count"])
    assert bool(gradient.isfinite())
    # Whose prior has an infinite mean.
    assert bool(expected_variance(f.view(2, 5), likelihood=likelihood).isfinite().all())


@pytest.mark.parametrize("df", [2.5, 1e4, 1e7, 1e9])
def test_nearly_gaussian_tails_keep_their_density_in_single_precision(df):
    f, y = torch.linspace(-3.0, 4.0, 10).view(5, 2), torch.ones(5, 2)
    found = StudentT(10, scale=0.5, df=df).log_likelihood(f, y)
    z = (1.0 - f.double().numpy()) / 0.5
    logs = scipy.stats.norm.logpdf(z) if df == 1e9 else scipy.stats.t.logpdf(z, df)
    expected = torch.tensor(logs - math.log(0.5)).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("count", [0, 3, 10**4, 10**6, 10**7])
def test_a_poisson_keeps_its_density_in_single_precision(count):
    rates = [math.log(0.99 * count), math.log(1.001 * count)] if count else []
    f = torch.tensor([*rates, -INF, -150.0, 80.0, 100.0, 800.0]).unsqueeze(1)
    found = Poisson(10).log_likelihood(f, torch.full(f.shape, count))
    log_rate = f[:, 0].double()
    terms = count * log_rate if count else 0.0
    expected = (terms - log_rate.exp() - math.lgamma(count + 1)).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [Poisson, NegativeBinomial])
def test_draws_of_huge_counts_are_not_negative(make):
    f = torch.tensor([[0.0], [40.0], [50.0], [80.0], [200.0]])
    drawn = make(10).sample(f, (2000,)).double().mean(0)
    mean = f.double().exp().clamp_max(1e300)
    # The standard deviation of a NegativeBinomial of one is its mean.
    torch.testing.assert_close(drawn[:4], mean[:4], rtol=0.12, atol=0.12)
    assert drawn[4] == INF


def test_a_negative_scale_has_no_density():
    likelihood = HeteroskedasticGaussian(1, positive_scale=True)
    assert likelihood.log_likelihood(torch.tensor([[0.0, -1.0]]), torch.zeros(1, 1)).isnan()


def test_counts_in_half_precision_are_drawn():
    drawn = Poisson(2).sample(torch.tensor([[0.0], [3.0]], dtype=torch.float16))
    assert bool(drawn.isfinite().all())


@pytest.mark.parametrize("positive_scale", [False, True])
def test_a_predicted_noise_that_rounds_to_zero_is_a_very_small_one(positive_scale):
    likelihood = HeteroskedasticGaussian(3, positive_scale=positive_scale)
    output = 0.0 if positive_scale else -200.0
    draws = torch.tensor([[[0.0, output]] * 3, [[0.0, 1.0]] * 3])
    y = torch.tensor([[0.0], [1e-3], [2.0]])
    found = likelihood.mixture_log_likelihood(draws, y)
    assert found[0] > 40  # which the net was sure of
    # The other draw has all of the density.
    expected = likelihood.log_likelihood(draws[1], y)[1:] - math.log(2)
    torch.testing.assert_close(found[1:], expected)
    aggregated = likelihood.aggregate_predictions(draws[:1])
    assert bool(aggregated.isfinite().all())
    ends = torch.tensor([[[-1.0, 1.0]], [[10.0, 20.0]], [[15.0, INF]]])
    found = Censored(likelihood).log_likelihood(draws[0], ends)
    assert found.tolist() == [0.0, -INF, -INF]
