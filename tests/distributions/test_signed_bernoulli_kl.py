"""The KL of two-valued weights and the Beta term: exact, stable, twice differentiable."""

import math

import numpy as np
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from scipy import special

from tests.oracles.signed_bernoulli import EXACT, SHAPE, each_value, logits
from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli, independent_moments
from tyxe.distributions.signed_bernoulli import RelaxedSignedBernoulli


def listing_b2(phi, phi0):
    """The KL with softpluses, by NumPy in float64."""

    def softplus(x):
        return torch.as_tensor(np.logaddexp(0, x.numpy()))

    return phi.sigmoid() * (softplus(-phi0) - softplus(-phi)) + (-phi).sigmoid() * (
        softplus(phi0) - softplus(phi)
    )


def test_the_kl_by_enumeration_and_by_the_listing():
    phi, phi0 = logits(*SHAPE), logits(*SHAPE)
    q, p = SignedBernoulli(phi, 0.2), SignedBernoulli(phi0, 0.2)
    values, probs = each_value(q)
    enumerated = (probs * (q.log_prob(values) - p.log_prob(values))).sum(0)
    kl = td.kl_divergence(q, p)
    torch.testing.assert_close(kl, enumerated, **EXACT)
    torch.testing.assert_close(kl, listing_b2(phi, phi0), **EXACT)
    bernoulli = td.kl_divergence(td.Bernoulli(logits=phi), td.Bernoulli(logits=phi0))
    torch.testing.assert_close(kl, bernoulli, rtol=1e-8, atol=1e-8)
    uniform = td.kl_divergence(q, SignedBernoulli(torch.zeros(SHAPE).double(), 0.2))
    torch.testing.assert_close(uniform, math.log(2) - q.entropy(), **EXACT)
    joint = td.kl_divergence(q.to_event(2), p.to_event(2))
    torch.testing.assert_close(joint, kl.sum(), **EXACT)
    assert td.kl_divergence(q, q).abs().max() == 0


EXTREMES = [-100.0, -40.0, -1.0, 0.0, 1.0, 40.0, 100.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("phi", EXTREMES)
@pytest.mark.parametrize("phi0", EXTREMES)
def test_the_kl_is_stable(phi, phi0, dtype):
    phi = torch.tensor(phi, dtype=dtype, requires_grad=True)
    phi0 = torch.tensor(phi0, dtype=dtype, requires_grad=True)
    kl = td.kl_divergence(SignedBernoulli(phi), SignedBernoulli(phi0))
    gradients = torch.autograd.grad(kl, [phi, phi0])
    # In closed form: sigmoid(phi) sigmoid(-phi) (phi - phi0), and the difference of probabilities.
    one, other = phi.detach().double(), phi0.detach().double()
    expected = one.sigmoid() * (-one).sigmoid() * (one - other), other.sigmoid() - one.sigmoid()
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    )
    for gradient, by_hand in zip(gradients, expected, strict=True):
        assert bool(gradient.isfinite())
        torch.testing.assert_close(gradient.double(), by_hand, **tolerance)
    assert kl.item() >= -1e-30
    # From a certain sign to the other one the divergence is the other's logit.
    if abs(phi) == 100 and phi == -phi0:
        assert kl.item() == pytest.approx(100, rel=1e-6)


def plain_kl(phi, phi0):
    log = nn.functional.logsigmoid
    return phi.sigmoid() * (log(phi) - log(phi0)) + (-phi).sigmoid() * (log(-phi) - log(-phi0))


def plain_moments(phi):
    positive, negative = phi.sigmoid(), (-phi).sigmoid()
    return torch.stack([0.2 * (positive - negative), 0.16 * positive * negative])


def our_moments(phi):
    return torch.stack(independent_moments(SignedBernoulli(phi, 0.2)))


def our_kl(phi, phi0):
    return td.kl_divergence(SignedBernoulli(phi), SignedBernoulli(phi0))


def weighted(function):
    """A number of what a function returns, with weights that tell the elements apart."""

    def number(phi):
        found = function(phi)
        weights = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view(found.shape)
        return (weights * found).sum() + found.square().sum()

    return number


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (our_moments, plain_moments),
        (lambda phi: our_kl(phi, torch.zeros(1, 1).double()), lambda phi: plain_kl(phi, 0 * phi)),
        (
            lambda phi: our_kl(phi, 1 - 2 * phi.detach()),
            lambda phi: plain_kl(phi, 1 - 2 * phi.detach()),
        ),
        (lambda phi: our_kl(phi, 1 - 2 * phi), lambda phi: plain_kl(phi, 1 - 2 * phi)),
    ],
    ids=["moments", "uniform", "fixed", "both"],
)
def test_first_and_second_derivatives_are_those_of_the_definition(ours, plain):
    phi = logits(4, 3)
    phi[0, 0] = 0.0  # where |phi| has a kink
    found = []
    for number in (weighted(ours), weighted(plain)):
        leaf = phi.clone().requires_grad_()
        value = number(leaf)
        (first,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad(weighted(lambda x: x)(first), leaf)
        transformed = torch.func.grad(number)(phi)
        rows = torch.func.vmap(number)(phi)
        found.append([value, first, second, transformed, rows])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_entropy_are_stable(dtype):
    phi = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    q = SignedBernoulli(phi)
    # sech^2 by an exponential that does not cancel. PyTorch rounds subnormal numbers to 0.
    small = torch.exp(-phi.detach().double().abs())
    expected = 4 * small / (1 + small) ** 2
    torch.testing.assert_close(
        q.variance.double(),
        expected,
        rtol=8 * torch.finfo(dtype).eps,
        atol=torch.finfo(dtype).tiny,
    )
    assert q.variance[1] > 0
    assert q.entropy()[1] > 0
    assert bool((q.entropy() >= 0).all())
    for quantity in (
        q.mean,
        q.variance,
        q.entropy(),
        td.kl_divergence(q, SignedBetaBernoulli(0.1)),
    ):
        (gradient,) = torch.autograd.grad(quantity.sum(), phi, retain_graph=True)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("delta", [0.0, 1e-4, 0.5, 3.0])
def test_the_beta_term_is_the_betas_density_up_to_a_constant(delta):
    phi = logits(*SHAPE)
    beta = td.Beta(*torch.tensor([1 + delta, 1 + delta], dtype=torch.float64))
    prior = SignedBetaBernoulli(delta)
    penalty = td.kl_divergence(SignedBernoulli(phi), prior)
    constant = special.betaln(1 + delta, 1 + delta)
    torch.testing.assert_close(penalty + constant, -beta.log_prob(phi.sigmoid()), **EXACT)
    joint = td.kl_divergence(SignedBernoulli(phi).to_event(2), prior.expand(SHAPE).to_event(2))
    torch.testing.assert_close(joint, penalty.sum(), **EXACT)
    relaxed = td.kl_divergence(RelaxedSignedBernoulli(phi, 0.5), prior)
    torch.testing.assert_close(relaxed, penalty, **EXACT)


def test_other_values_are_infinitely_far():
    for prior in (SignedBernoulli(0.0, 0.5), SignedBetaBernoulli(0.1, 0.5)):
        assert td.kl_divergence(SignedBernoulli(0.0), prior).item() == math.inf
