"""Distributions on two values: by enumeration, their supports and copies, relaxed draws."""

import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.signed_bernoulli import EXACT, SCALES, SHAPE, each_value, logits
from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli
from tyxe.distributions.buffered import BufferedDistribution, detached
from tyxe.distributions.signed_bernoulli import PackedSigns, RelaxedSignedBernoulli, Signs
from tyxe.util import same_support

# --- the distribution ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_moments_entropy_and_mode_by_enumeration(scale):
    phi = logits(*SHAPE)
    q = SignedBernoulli(phi, scale)
    values, probs = each_value(q)
    assert values.shape == (2, *SHAPE)
    assert values.unique().tolist() == [-scale, scale]
    torch.testing.assert_close(probs.sum(0), torch.ones(SHAPE).double(), **EXACT)
    torch.testing.assert_close(probs[1], phi.sigmoid(), **EXACT)
    mean = (probs * values).sum(0)
    torch.testing.assert_close(q.mean, mean, **EXACT)
    torch.testing.assert_close(q.variance, (probs * (values - mean) ** 2).sum(0), **EXACT)
    torch.testing.assert_close(q.entropy(), -(probs * probs.log()).sum(0), **EXACT)
    assert torch.equal(q.mode, values.gather(0, probs.argmax(0)[None])[0])
    assert q.enumerate_support(expand=False).shape == (2, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_samples_are_the_two_values_at_their_frequencies(scale, dtype):
    q = SignedBernoulli(logits(*SHAPE).to(dtype), scale, validate_args=True)
    samples = q.sample((20_000,))
    assert samples.dtype == dtype
    assert samples.shape == (20_000, *SHAPE)
    assert bool(q.support.check(samples).all())
    assert bool(q.support.check(q.mode).all())
    assert bool(q.log_prob(samples).isfinite().all())
    # Six standard errors of a frequency.
    frequency, p = (samples > 0).double().mean(0), q.probs.double()
    assert bool(((frequency - p).abs() <= 6 * (p * (1 - p) / 20_000).sqrt()).all())
    assert not q.has_rsample
    assert not SignedBernoulli(q.logits.requires_grad_()).sample().requires_grad


def test_values_off_the_support_have_no_probability():
    q = SignedBernoulli(torch.zeros(2).double(), 0.5, validate_args=False)
    log_prob = q.log_prob(torch.tensor([0.5, 1.0]).double())
    assert log_prob.tolist() == pytest.approx([math.log(0.5), -math.inf], rel=1e-12)
    with pytest.raises(ValueError, match="within the support"):
        SignedBernoulli(torch.zeros(2), 0.5, validate_args=True).log_prob(torch.ones(2))


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
    for copied in (
        q.expand(SHAPE),
        detached(q.expand(SHAPE)),
        pickle.loads(pickle.dumps(q.expand(SHAPE))),
        BufferedDistribution(q.expand(SHAPE)).distribution,
    ):
        assert type(copied) is type(q)
        assert copied.batch_shape == SHAPE
        assert vars(copied).get("temperature") == vars(q).get("temperature")
        assert vars(copied).get("delta") == vars(q).get("delta")
        values, _ = each_value(copied)
        assert torch.equal(copied.log_prob(values), q.log_prob(values))
        assert copied.support == Signs(0.3)
    event = q.expand(SHAPE).to_event(2)
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


def test_relaxed_draws_have_the_sign_of_a_draw_and_a_gradient():
    phi = logits(*SHAPE).requires_grad_()
    q = RelaxedSignedBernoulli(phi, 0.1)
    draws = q.rsample((20_000,))
    frequency, p = (draws > 0).double().mean(0), q.probs
    assert bool(((frequency - p).abs() <= 6 * (p * (1 - p) / 20_000).sqrt()).all())

    def total(phi):
        torch.manual_seed(0)
        return RelaxedSignedBernoulli(phi, 0.8).rsample((5,)).square().sum()

    assert torch.autograd.gradcheck(total, (phi,))
    assert q.sample().abs().unique().tolist() == [1.0]
    torch.testing.assert_close(
        td.kl_divergence(q, SignedBernoulli(0.3)),
        td.kl_divergence(SignedBernoulli(phi), SignedBernoulli(0.3)),
        **EXACT,
    )


# --- samples of a bit each ------------------------------------------------------------------------


@given(
    count=st.integers(1, 5),
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    scale=st.sampled_from([1.0, 0.2, 3.0]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_packing_is_exact_to_the_bit(count, shape, scale, dtype):
    values = SignedBernoulli(torch.randn(shape).to(dtype), scale).sample((count,))
    packed = PackedSigns.of(values, scale)
    unpacked = torch.stack([packed[s] for s in range(count)])
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, values)
    assert packed.num_bytes == packed.bits.nbytes == count * math.ceil(math.prod(shape) / 8)
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again[count - 1], values[-1])
