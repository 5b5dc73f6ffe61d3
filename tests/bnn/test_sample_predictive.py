"""Targets from the posterior predictive distribution, intervals and scores, in closed form."""

import copy
import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import tyxe
from tests.oracles.bnns import NORMAL
from tyxe.guides import AutoNormal, init_to_zero
from tyxe.likelihoods import HomoskedasticGaussian

X = torch.tensor([[0.5, 1.0], [-1.0, 2.0], [0.0, 0.0]])


def bnn_of(likelihood, outputs: int = 1, **guides) -> tyxe.VariationalBNN:
    """A linear net without a bias, whose weights have N(0, 0.3^2) in the guide."""
    guide = partial(AutoNormal, init_loc_fn=init_to_zero, init_scale=0.3)
    net = nn.Linear(2, outputs, bias=False)
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide, **guides)


@pytest.mark.parametrize("predictive", ["bnn", "glm"])
def test_samples_of_inferred_noise_are_of_the_posterior_s_draws(predictive: str):
    """And not of the prior's mean, which is e^1.125 here; the guide says 0.1, and a bit."""
    likelihood = HomoskedasticGaussian(10, scale=dist.LogNormal(1.0, 0.5))
    bnn = bnn_of(likelihood, likelihood_guide_builder=noise_guide)
    zero = torch.zeros(1, 2)
    samples = bnn.sample_predictive(zero, num_samples=8_000, predictive=predictive)[:, 0, 0]
    scales = torch.exp(math.log(0.1) + 0.4 * torch.randn(200_000))
    expected = scales.square().mean().sqrt()
    assert samples.std() == pytest.approx(expected.item(), rel=0.05)
    # Heavier tails than a Gaussian's: the scale is drawn, and not averaged.
    kurtosis = (samples / samples.std()).pow(4).mean()
    assert kurtosis > 3.5


def noise_guide(program):
    return AutoNormal(program, init_loc_fn=lambda site: torch.tensor(0.1), init_scale=0.4)


@pytest.mark.parametrize("predictive", ["bnn", "glm"])
def test_an_interval_has_the_normal_s_quantiles(predictive: str):
    bnn = bnn_of(HomoskedasticGaussian(10, scale=0.5))
    how = {"num_samples": 12_000, "predictive": predictive}
    lower, upper = bnn.interval(X, level=0.8, **how)
    scale = (0.3**2 * X.square().sum(1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(upper, 1.2816 * scale, rtol=0.04, atol=0.01)
    torch.testing.assert_close(lower, -1.2816 * scale, rtol=0.04, atol=0.01)


@pytest.mark.parametrize(("level", "num_samples"), [(0.9, 10), (0.9, 24), (0.5, 2), (0.99, 1)])
def test_an_interval_of_few_samples_holds_a_target_as_often_as_said(level: float, num_samples: int):
    bnn = bnn_of(HomoskedasticGaussian(10, scale=0.5))
    rows = torch.randn(2000, 2)
    lower, upper = bnn.interval(rows, level=level, num_samples=num_samples, predictive="glm")
    scale = (0.3**2 * rows.square().sum(1, keepdim=True) + 0.25).sqrt()
    normal = dist.Normal(0, scale)
    held = (normal.cdf(upper) - normal.cdf(lower)).flatten()
    assert held.mean() > level - 4 * held.std() / math.sqrt(len(held))


LIKELIHOODS = {
    "Bernoulli": (tyxe.likelihoods.Bernoulli(10), 1),
    "HeteroskedasticGaussian": (tyxe.likelihoods.HeteroskedasticGaussian(10), 2),
    "Poisson": (tyxe.likelihoods.Poisson(10), 1),
    "HomoskedasticGaussian": (HomoskedasticGaussian(10, precision=4.0), 2),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_intervals_of_every_likelihood_with_an_order(name: str):
    likelihood, outputs = LIKELIHOODS[name]
    bnn = bnn_of(likelihood, outputs)
    lower, upper = bnn.interval(X, num_samples=200)
    samples = bnn.sample_predictive(X, num_samples=50)
    assert lower.shape == upper.shape == samples.shape[1:]
    assert (lower <= upper).all()
    inside = ((samples >= lower) & (samples <= upper)).float().mean()
    assert inside > 0.7


def test_batches_have_the_same_weights_and_other_noise():
    bnn = bnn_of(HomoskedasticGaussian(10, scale=1e-6))
    rows = X[:1].expand(4, 2)
    samples = bnn.sample_predictive(rows, num_samples=5, batch_size=1)
    torch.testing.assert_close(samples, samples[:, :1].expand(5, 4, 1), rtol=0, atol=1e-4)
    assert not torch.equal(samples[:, 0], samples[:, 1])


def test_what_has_no_interval_says_so():
    with pytest.raises(TypeError, match="classes, which have no order"):
        bnn_of(tyxe.likelihoods.Categorical(10), 3).interval(X)
    bnn = bnn_of(HomoskedasticGaussian(10, scale=1.0))
    with pytest.raises(ValueError, match="level is 90"):
        bnn.interval(X, level=90)
    with pytest.raises(ValueError, match="num_samples is 0"):
        bnn.sample_predictive(X, num_samples=0)


@pytest.mark.parametrize("noise", [0.5, 0.01])
def test_the_glm_scores_coupled_outputs_together(noise: float):
    """Against the joint Normal, with the covariance of a net linearised by hand."""
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 5, bias=False))
    guide = partial(AutoNormal, init_scale=0.3)
    bnn = tyxe.VariationalBNN(net, NORMAL, HomoskedasticGaussian(10, scale=noise), guide)
    targets = torch.randn(3, 5)
    _, found = bnn.evaluate(X, targets, num_predictions=8, predictive="glm", reduction="none")
    exact = copy.deepcopy(net).double()
    values = dict(exact.named_parameters())
    rows = jacrev(lambda v: functional_call(exact, v, (X.double(),)))(values)
    jacobian = torch.cat([rows[name].flatten(2) for name in values], -1)
    covariance = 0.3**2 * jacobian @ jacobian.mT + noise**2 * torch.eye(5)
    assert covariance.triu(1).abs().max() > 1e-2
    joint = torch.distributions.MultivariateNormal(exact(X.double()), covariance)
    expected = joint.log_prob(targets.double()).float()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_glm_evaluates_the_mixture():
    """A Poisson's far point."""
    counts = bnn_of(tyxe.likelihoods.Poisson(10))
    far, y = torch.tensor([[6.0, 6.0]]), torch.tensor([[3.0]])
    _, by_glm = counts.evaluate(far, y, num_predictions=6_000, predictive="glm")
    _, by_draws = counts.evaluate(far, y, num_predictions=6_000)
    assert by_glm.item() == pytest.approx(by_draws.item(), abs=0.1)


def test_targets_of_every_batch_are_checked_and_scores_are_numbers():
    bnn = bnn_of(tyxe.likelihoods.Bernoulli(10))
    loader = [(X, torch.ones(3, 1)), (X, torch.full((3, 1), 2.0))]
    for predictive in ("bnn", "glm"):
        with pytest.raises(ValueError, match="outside the support"):
            bnn.evaluate(loader, predictive=predictive, num_predictions=2)
        with pytest.raises(ValueError, match="3 of 3 points is not a number"):
            bnn.evaluate(X * torch.nan, torch.ones(3, 1), predictive=predictive)


def test_a_number_of_noise_is_trained_if_asked():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.3 * torch.randn(200, 1)
    for how in ({"scale": 1.0, "learn_scale": True}, {"scale": nn.Parameter(torch.tensor(1.0))}):
        bnn = bnn_of(HomoskedasticGaussian(200, **how))
        bnn.fit([(x, y)], partial(torch.optim.Adam, lr=5e-2), 200)
        assert bnn.likelihood.scale.item() == pytest.approx(0.3, rel=0.15)
    fixed = bnn_of(HomoskedasticGaussian(200, scale=1.0))
    fixed.fit([(x, y)], partial(torch.optim.Adam, lr=3e-2), 5)
    assert fixed.likelihood.scale.item() == 1.0
