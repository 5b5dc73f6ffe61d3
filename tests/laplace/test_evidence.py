"""The log evidence against conjugate models, dense ones and its own gradient."""

import copy
import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.laplace import STRUCTURES, fitted, orthogonal, regression

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_conjugate_regression_is_exact(structure):
    features = orthogonal() if structure == "diag" else None
    bnn, x, y, design, precision, mean = regression(structure, features)
    bnn.fit_curvature([(x, y)])
    found = bnn.net_guide.precision.to_dense()
    torch.testing.assert_close(found, precision, rtol=1e-9, atol=1e-8)
    # The evidence of the conjugate model is that of y ~ N(0, noise^2 I + scale^2 X X^T).
    covariance = 0.25 * torch.eye(len(x)) + 1.3**2 * design @ design.mT
    exact = td.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y[:, 0])
    torch.testing.assert_close(bnn.log_marginal_likelihood(), exact, rtol=1e-9, atol=1e-9)
    test = torch.randn(5, 3)
    rows = torch.cat([test, torch.ones(5, 1)], 1)
    variance = (rows @ torch.linalg.inv(precision) * rows).sum(1, keepdim=True) + 0.25
    got_mean, got_scale = bnn.predict(test)
    torch.testing.assert_close(got_mean, rows @ mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_scale, variance.sqrt(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
@pytest.mark.parametrize(("scale", "noise"), [(0.4, 0.5), (1.3, 0.9), (3.0, 0.2)])
def test_the_evidence_at_another_prior_and_noise_with_the_mode_held(structure, scale, noise):
    bnn, x, y, design, _, mean = regression(structure)
    bnn.fit_curvature([(x, y)])
    precision = design.mT @ design / noise**2 + torch.eye(4) / scale**2
    residual = y - design @ mean
    # Its parts, each written out.
    log_likelihood = td.Normal(0.0, noise).log_prob(residual).sum()
    expected = (
        log_likelihood
        - 0.5 * mean.square().sum() / scale**2
        - 4 * math.log(scale)
        - 0.5 * torch.logdet(precision)
    )
    for given in (scale**-2, torch.tensor([scale**-2])):
        found = bnn.log_marginal_likelihood(given, noise)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_gradient_of_the_evidence(structure, temperature):
    """In one precision, in one for each layer and, where there may be any, for each weight."""
    bnn, *_ = fitted(structure, temperature=temperature)
    parameters = dict(bnn.net.named_parameters())
    given = [torch.tensor(number, requires_grad=True) for number in (0.7, 2.0)]

    def by_layer(*numbers):
        layers = dict(zip("02", numbers, strict=True))
        return bnn.log_marginal_likelihood({name: layers[name[0]] for name in parameters})

    def by_weight(*numbers):
        return bnn.log_marginal_likelihood(dict(zip(parameters, numbers, strict=True)))

    assert torch.autograd.gradcheck(bnn.log_marginal_likelihood, given[:1])
    assert torch.autograd.gradcheck(by_layer, given)
    if structure in ("full", "diag"):
        each = [(0.5 + torch.rand_like(p)).requires_grad_() for p in parameters.values()]
        assert torch.autograd.gradcheck(by_weight, each)


def test_kron_has_the_gradient_for_numbers_of_weight_and_bias_apart():
    """It takes no two numbers, but differs from full by nothing where its block is exact."""
    found = []
    for structure in ("full", "kron"):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.7)
        bnn = tyxe.LaplaceBNN(net, NORMAL, likelihood, structure=structure)
        bnn.fit_curvature([(torch.randn(6, 3), torch.randn(6, 2))])
        given = {n: torch.full_like(p, 0.8) for n, p in net.named_parameters()}
        numbers = {n: torch.tensor(0.8) for n in given}
        for precisions in (given, numbers):
            for names in (["weight", "bias"], ["weight"], ["bias"]):
                own = {name: value.clone() for name, value in precisions.items()}
                leaves = [own[name].requires_grad_() for name in names]
                found.append(torch.autograd.grad(bnn.log_marginal_likelihood(own), leaves))
    for full, kron in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
        torch.testing.assert_close(kron, full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_evidence_of_a_net_in_half_precision_is_summed_in_single(structure):
    """Thousands of small terms: their sum in bfloat16 would be off by nats."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 2)).bfloat16()
    if structure == "full":
        net = nn.Linear(40, 30).bfloat16()
    x, y = torch.randn(6, 40).bfloat16(), torch.arange(6) % 2
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 0.125))
        own, likelihood = copy.deepcopy(net).to(dtype), tyxe.likelihoods.Categorical(6)
        bnn = tyxe.LaplaceBNN(own, prior, likelihood, structure=structure)
        bnn.fit_curvature([(x.to(dtype), y)])
        found.append((bnn.log_marginal_likelihood(), bnn.optimize_prior_precision()))
    (half, half_best), (single, best) = found
    # What is left is the net's own rounding, in the outputs of six points.
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, single, rtol=0, atol=0.3)
    torch.testing.assert_close(half_best, best, rtol=0.01, atol=0)


def test_the_evidence_with_a_temperature_is_its_parts():
    bnn, x, y = fitted("full", temperature=0.5)
    curvature = bnn.state.curvature
    dense = 2 * curvature.operator.to_dense() + torch.eye(curvature.operator.size)
    weights = curvature.blocks.flatten(bnn._mean_values())
    log_likelihood = bnn.evaluate(x, y, 0, predictive="bnn")[1]
    expected = 2 * log_likelihood - weights.square().sum() / 2 - torch.logdet(dense) / 2
    torch.testing.assert_close(bnn.log_marginal_likelihood(), expected, rtol=1e-9, atol=1e-9)


def test_one_number_for_each_kronecker_block():
    bnn, *_ = fitted()
    given = {name: 1.0 for name, _ in bnn.net.named_parameters()}
    with pytest.raises(ValueError, match=r"net.0.weight and net.0.bias have different prior"):
        bnn.log_marginal_likelihood({**given, "0.bias": 2.0})
    less = {name: value for name, value in given.items() if name != "2.bias"}
    for other in (less, {**given, "foo": 3.0}):
        with pytest.raises(ValueError, match=r"expected a number for each of .*, 2\.bias"):
            bnn.log_marginal_likelihood(other)
