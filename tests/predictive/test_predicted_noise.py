"""Linearised nets that predict the noise: moments and densities against many draws, and by row."""

import math

import pytest
import torch
from torch.nn.functional import softplus

import tyxe
from tests.oracles.bnns import NORMAL, two_layers
from tyxe.data import read_targets
from tyxe.predictive.distributions import gaussian_distribution
from tyxe.predictive.evaluation import gaussian_scores
from tyxe.predictive.gaussian import GaussianOutputs, LinkOptions
from tyxe.predictive.links import sample_outputs

pytestmark = pytest.mark.usefixtures("double")

N, S = 12, 200_000


def laplace(targets=1):
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 2 * N).view(N, 2)
    y = torch.stack([x.sum(1).sin(), x[:, 0].cos()], 1)[:, :targets]
    net = two_layers(2, 6, 2 * targets)
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(N)
    bnn = tyxe.LaplaceBNN(net, NORMAL, likelihood, structure="full")
    bnn.fit_curvature([(x, y)])
    return bnn, x, y


def many(bnn, x):
    """Return draws of means and of scales of the noise, `(S, n, d)` each."""
    outputs = bnn.predict(x, predictive="glm", aggregate=False, num_predictions=S)
    loc, raw = outputs.chunk(2, -1)
    return loc, softplus(raw)


@pytest.mark.parametrize("targets", [1, 2])
def test_the_mean_is_the_nets_and_the_variance_that_of_many_draws(targets):
    bnn, x, _ = laplace(targets)
    mean, raw = bnn.predict(x).chunk(2, -1)
    torch.testing.assert_close(mean, bnn.predict(x, num_predictions=0)[:, :targets])
    loc, noise = many(bnn, x)
    draws = (loc - mean).square() + noise.square()
    error = draws.std(0) / math.sqrt(S)
    assert bool(((softplus(raw).square() - draws.mean(0)).abs() < 5 * error).all())


@pytest.mark.parametrize("targets", [1, 2])
def test_the_density_is_that_of_many_draws(targets):
    bnn, x, y = laplace(targets)
    loc, noise = many(bnn, x)
    density = torch.distributions.Normal(loc, noise).log_prob(y).sum(-1).exp()
    error = density.std(0) / math.sqrt(S) / density.mean(0)
    how = {} if targets == 1 else {"num_predictions": 2_000}  # nodes for several numbers
    evaluated = bnn.evaluate(x, y, reduction="none", **how)[1]
    for found in (evaluated, bnn.predictive(x, **how).log_prob(y)):
        assert bool(((found - density.mean(0).log()).abs() < 5 * error).all())


@pytest.mark.parametrize("targets", [1, 2])
def test_all_that_is_predicted_of_a_row_is_a_function_of_it(targets):
    bnn, x, y = laplace(targets)
    whole, again = bnn.predict(x), bnn.predict(x)
    assert torch.equal(whole, again)
    found = bnn.predictive(x)
    scores = bnn.evaluate(x, y, reduction="none")
    assert torch.equal(scores[1], bnn.evaluate(x, y, reduction="none")[1])
    for i in range(N):
        one = slice(i, i + 1)
        torch.testing.assert_close(bnn.predict(x[one]), whole[one])
        alone = bnn.predictive(x[one])
        for name in ("mean", "variance"):
            torch.testing.assert_close(getattr(alone, name), getattr(found, name)[one])
        for a, b in zip(bnn.evaluate(x[one], y[one], reduction="none"), scores, strict=True):
            torch.testing.assert_close(a, b[one])


def test_the_distribution_has_the_moments_of_predict():
    bnn, x, _ = laplace()
    found, (mean, raw) = bnn.predictive(x), bnn.predict(x).chunk(2, -1)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.stddev, softplus(raw))
    assert found.sample((5,)).shape == (5, N, 1)


OPTIONS = LinkOptions("mc", 100, {})
LIKELIHOOD = tyxe.likelihoods.HeteroskedasticGaussian(N)


def moments(*shape, rank=None):
    torch.manual_seed(1)
    root = torch.randn(*shape, rank or shape[-1])
    return torch.randn(shape), root @ root.mT


def test_tied_and_certain_outputs():
    """Scales that are the means over, and those without variance, leave a density."""
    mean, covariance = moments(5, 2, rank=1)
    y = torch.randn(5, 1)
    outputs = sample_outputs(mean, covariance, S)
    normal = torch.distributions.Normal(outputs[..., :1], softplus(outputs[..., 1:]))
    density = normal.log_prob(y).sum(-1).exp()
    error = density.std(0) / math.sqrt(S) / density.mean(0)
    found = gaussian_scores(LIKELIHOOD, mean, covariance, y, OPTIONS).log_likelihood
    assert bool(((found - density.mean(0).log()).abs() < 5 * error).all())
    certain = gaussian_scores(LIKELIHOOD, mean, 0 * covariance, y, OPTIONS).log_likelihood
    loc, raw = mean.chunk(2, -1)
    expected = torch.distributions.Normal(loc, softplus(raw)).log_prob(y).sum(-1)
    torch.testing.assert_close(certain, expected)
    at_mean = OPTIONS._replace(num_samples=0)
    found = gaussian_scores(LIKELIHOOD, mean, covariance, y, at_mean).log_likelihood
    torch.testing.assert_close(found, expected)


def log_likelihood(mean, covariance, y, options=OPTIONS):
    targets = LIKELIHOOD.observed(read_targets(y))
    return gaussian_scores(LIKELIHOOD, mean, covariance, targets, options).log_likelihood


def test_positions_are_independent_and_missing_numbers_left_out():
    mean, covariance = moments(5, 3, 4)
    y = torch.randn(5, 3, 2)
    y[0, 0, 0] = y[1, 2] = math.nan
    rows = mean.flatten(0, 1), covariance.flatten(0, 1), y.flatten(0, 1)
    each = log_likelihood(*rows)
    torch.testing.assert_close(log_likelihood(mean, covariance, y), each.view(5, 3).sum(1))
    assert abs(float(each[5])) < 1e-12
    # The second number alone has nodes in one dimension.
    precise = log_likelihood(*(part[:1] for part in rows), OPTIONS._replace(num_samples=2**14))
    kept = torch.tensor([1, 3])
    alone = log_likelihood(mean[0, :1, kept], covariance[0, :1, kept][..., kept], y[0, :1, 1:])
    torch.testing.assert_close(precise, alone, rtol=1e-3, atol=1e-3)


def test_of_positions_the_distribution_is_what_is_scored():
    mean, covariance = moments(5, 3, 4)
    y = torch.randn(5, 3, 2)
    found = gaussian_distribution(LIKELIHOOD, GaussianOutputs(mean, covariance, OPTIONS))
    assert found.batch_shape == (5,)
    torch.testing.assert_close(found.log_prob(y), log_likelihood(mean, covariance, y))


def test_half_precision_and_gradients():
    mean, covariance = (part.bfloat16() for part in moments(5, 4))
    y = torch.randn(5, 2, dtype=torch.bfloat16)
    single = log_likelihood(mean.float(), covariance.float(), y.float())
    torch.testing.assert_close(log_likelihood(mean, covariance, y), single)
    mean, covariance = moments(3, 4)
    mean.requires_grad_()
    log_likelihood(mean, covariance, torch.randn(3, 2)).sum().backward()
    assert bool(mean.grad.isfinite().all())


@pytest.mark.parametrize(("sd", "tie"), [(0.3, 0.999), (1.0, 1.0), (6.0, 0.0), (6.0, 0.95)])
def test_the_density_of_one_number_is_its_integral(sd, tie):
    """Of a mean that is tied to the scale, it is narrow; and far from normal for a wide scale."""
    y = torch.tensor([[0.0], [0.3], [2.0], [10.0]]).double()
    mean = torch.tensor([0.0, -4.0]).double().expand(4, 2)
    both = torch.tensor([[1.0, tie * sd], [tie * sd, sd**2]]).double().expand(4, 2, 2)
    z = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    variance = 1 - tie**2 + softplus(-4.0 + sd * z).square()
    squares = (y - tie * z).square() / variance + variance.log() + z.square()
    expected = (-0.5 * squares).logsumexp(1) + math.log(float(z[1] - z[0]) / (2 * math.pi))
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(4)
    options, given = LinkOptions("mc", 100, {}), tyxe.data.Targets.of(y)
    found = gaussian_scores(likelihood, mean, both, given, options).log_likelihood
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    law = gaussian_distribution(likelihood, GaussianOutputs(mean, both, options))
    torch.testing.assert_close(law.log_prob(y.expand(3, 4, 1)), found.expand(3, 4))
