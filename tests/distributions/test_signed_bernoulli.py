"""Weights of two values: by enumeration, relaxed and packed, their KL, and sums of many."""

import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli, independent_moments
from tyxe.distributions.buffered import BufferedDistribution, detached
from tyxe.distributions.signed_bernoulli import PackedSigns, RelaxedSignedBernoulli, Signs
from tyxe.util import same_support

SHAPE = (3, 2)
SCALES = [1.0, 0.2]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def logits(*shape):
    return 2 * torch.randn(*shape).double()


def each_value(q):
    """Values and their probabilities, along the first dimension."""
    values = q.enumerate_support()
    return values, q.log_prob(values).exp()


# --- the distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_moments_entropy_and_mode_by_enumeration(scale):
    phi = logits(*SHAPE)
    q = SignedBernoulli(phi, scale)
    values, probs = each_value(q)
    assert values.shape == (2, *SHAPE)
    assert values.unique().tolist() == [-scale, scale]
    mean = (probs * values).sum(0)
    for found, expected in (
        (probs.sum(0), torch.ones(SHAPE).double()),
        (probs[1], phi.sigmoid()),
        (q.mean, mean),
        (q.variance, (probs * (values - mean) ** 2).sum(0)),
        (q.entropy(), -(probs * probs.log()).sum(0)),
    ):
        torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(q.mode, values.gather(0, probs.argmax(0)[None])[0])
    assert q.enumerate_support(expand=False).shape == (2, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_are_the_two_values_at_their_frequencies(dtype):
    q = SignedBernoulli(logits(*SHAPE).to(dtype).requires_grad_(), 0.2, validate_args=True)
    samples = q.sample((20_000,))
    assert (samples.dtype, samples.shape) == (dtype, (20_000, *SHAPE))
    assert not samples.requires_grad
    assert not q.has_rsample
    for values in (samples, q.mode):
        assert bool(q.support.check(values).all())
        assert bool(q.log_prob(values).isfinite().all())
    # Six standard errors of a frequency.
    frequency, p = (samples > 0).double().mean(0), q.probs.double()
    assert bool(((frequency - p).abs() <= 6 * (p * (1 - p) / 20_000).sqrt()).all())


def test_values_off_the_support_have_no_probability():
    q = SignedBernoulli(torch.zeros(2).double(), 0.5, validate_args=False)
    log_prob = q.log_prob(torch.tensor([0.5, 1.0]).double())
    assert log_prob.tolist() == pytest.approx([math.log(0.5), -math.inf], rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda phi: SignedBernoulli(phi, 0.3),
        lambda phi: RelaxedSignedBernoulli(phi, 0.7, 0.3),
        lambda phi: SignedBetaBernoulli(0.1, 0.3),
    ],
    ids=["plain", "relaxed", "beta"],
)
def test_copies_keep_what_makes_the_distribution(make):
    q = make(torch.tensor(1.5).double())
    expanded = q.expand(SHAPE)
    for copied in (
        expanded,
        detached(expanded),
        pickle.loads(pickle.dumps(expanded)),
        BufferedDistribution(expanded).distribution,
    ):
        assert (type(copied), copied.batch_shape) == (type(q), SHAPE)
        for name in ("temperature", "delta"):
            assert vars(copied).get(name) == vars(q).get(name)
        values, _ = each_value(copied)
        assert torch.equal(copied.log_prob(values), q.log_prob(values))
        assert copied.support == Signs(0.3)
    event = expanded.to_event(2)
    assert event.event_shape == SHAPE
    assert event.support.is_discrete
    assert BufferedDistribution(q.expand((50, 50))).logits.numel() == 1


def test_supports():
    one, other = SignedBernoulli(0.0), SignedBernoulli(1.0, 0.5)
    assert same_support(one.support, SignedBetaBernoulli(1.0).to_event(0).support)
    assert same_support(one.expand(SHAPE).to_event(2).support, one.support)
    assert not same_support(one.support, other.support)
    assert not same_support(one.support, dist.Normal(0.0, 1.0).support)
    assert not same_support(one.support, dist.Bernoulli(0.5).support)
    assert hash(one.support) == hash(Signs())


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: SignedBernoulli(0.0, scale=0.0), "scale is 0.0; expected a number above 0"),
        (lambda: SignedBetaBernoulli(-1e-3), "delta is -0.001"),
        (lambda: RelaxedSignedBernoulli(0.0, 0.0), "temperature is 0.0"),
        (lambda: SignedBernoulli(math.nan, validate_args=True), "to satisfy the constraint"),
        (
            lambda: SignedBernoulli(0.0, 0.5, validate_args=True).log_prob(torch.ones(())),
            "within the support",
        ),
    ],
)
def test_bad_arguments(build, match):
    with pytest.raises(ValueError, match=match):
        build()


# --- relaxed draws ------------------------------------------------------------------------------


def test_relaxed_draws_are_those_of_torchs_relaxed_bernoulli():
    phi = logits(500)
    torch.manual_seed(3)
    ours = RelaxedSignedBernoulli(phi, 0.6, 0.5).rsample((4,))
    torch.manual_seed(3)
    theirs = td.RelaxedBernoulli(torch.tensor(0.6).double(), logits=phi).rsample((4,))
    torch.testing.assert_close(ours, 0.5 * (2 * theirs - 1), rtol=1e-8, atol=1e-8)


def test_relaxed_draws_have_a_gradient_and_the_kl_of_the_two_values():
    phi = logits(*SHAPE).requires_grad_()

    def total(phi):
        torch.manual_seed(0)
        return RelaxedSignedBernoulli(phi, 0.8).rsample((5,)).square().sum()

    assert torch.autograd.gradcheck(total, (phi,))
    q, p = RelaxedSignedBernoulli(phi, 0.1), SignedBernoulli(0.3)
    assert q.sample().abs().unique().tolist() == [1.0]
    expected = td.kl_divergence(SignedBernoulli(phi), p)
    torch.testing.assert_close(td.kl_divergence(q, p), expected, **EXACT)


# --- samples of a bit each ------------------------------------------------------------------------


@given(
    count=st.integers(1, 5),
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    scale=st.sampled_from([1.0, 0.2, 3.0]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
@settings(max_examples=40)
def test_packing_is_exact_to_the_bit(count, shape, scale, dtype):
    values = SignedBernoulli(torch.randn(shape).to(dtype), scale).sample((count,))
    packed = PackedSigns.of(values, scale)
    unpacked = torch.stack([packed[s] for s in range(count)])
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, values)
    assert packed.num_bytes == packed.bits.nbytes == count * math.ceil(math.prod(shape) / 8)


# --- the KL -------------------------------------------------------------------------------------


def test_the_kl_by_enumeration():
    q, p = (SignedBernoulli(logits(*SHAPE), 0.2) for _ in range(2))
    values, probs = each_value(q)
    kl = td.kl_divergence(q, p)
    enumerated = (probs * (q.log_prob(values) - p.log_prob(values))).sum(0)
    torch.testing.assert_close(kl, enumerated, **EXACT)
    joint = td.kl_divergence(q.to_event(2), p.to_event(2))
    torch.testing.assert_close(joint, kl.sum(), **EXACT)
    uniform = td.kl_divergence(q, SignedBernoulli(torch.zeros(SHAPE).double(), 0.2))
    torch.testing.assert_close(uniform, math.log(2) - q.entropy(), **EXACT)
    assert td.kl_divergence(q, q).abs().max() == 0


EXTREMES = [-100.0, -40.0, -1.0, 0.0, 1.0, 40.0, 100.0]


TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("phi", EXTREMES)
@pytest.mark.parametrize("phi0", EXTREMES)
def test_the_kl_is_stable(phi, phi0, dtype):
    pair = [torch.tensor(v, dtype=dtype, requires_grad=True) for v in (phi, phi0)]
    kl = td.kl_divergence(*map(SignedBernoulli, pair))
    gradients = torch.autograd.grad(kl, pair)
    # In closed form: sigmoid(phi) sigmoid(-phi) (phi - phi0), and the difference of probabilities.
    one, other = (leaf.detach().double() for leaf in pair)
    expected = one.sigmoid() * (-one).sigmoid() * (one - other), other.sigmoid() - one.sigmoid()
    for gradient, by_hand in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), by_hand, **TOLERANCE[dtype])
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


def fixed(phi):
    return 1 - 2 * phi.detach()


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
        (lambda phi: our_kl(phi, fixed(phi)), lambda phi: plain_kl(phi, fixed(phi))),
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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_moments_and_entropy_are_stable(dtype):
    phi = torch.tensor(EXTREMES, dtype=dtype, requires_grad=True)
    q = SignedBernoulli(phi)
    # sech^2 by an exponential that does not cancel. PyTorch rounds subnormal numbers to 0.
    small = torch.exp(-phi.detach().double().abs())
    expected, limits = 4 * small / (1 + small) ** 2, torch.finfo(dtype)
    found = q.variance.double()
    torch.testing.assert_close(found, expected, rtol=8 * limits.eps, atol=limits.tiny)
    assert q.variance[1] > 0
    assert q.entropy()[1] > 0
    assert bool((q.entropy() >= 0).all())
    penalty = td.kl_divergence(q, SignedBetaBernoulli(0.1))
    for quantity in (q.mean, q.variance, q.entropy(), penalty):
        (gradient,) = torch.autograd.grad(quantity.sum(), phi, retain_graph=True)
        assert bool(gradient.isfinite().all())
    half = independent_moments(SignedBernoulli(torch.tensor(30.0, dtype=torch.float16)))[1]
    assert half.dtype == torch.float32
    assert half.item() > 0


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
