"""FactorizedNormal is an independent Normal, and PrunedNormal one over what is kept."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import Size

from tests.oracles.inducing_gaussians import close, randn
from tests.oracles.normals import SHAPE, factorized
from tyxe.distributions import FactorizedNormal, PrunedNormal, center, independent_moments
from tyxe.distributions.buffered import detached


def test_a_factorized_normal_is_an_independent_normal():
    q = factorized()
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    value = q.sample()
    torch.testing.assert_close(q.log_prob(value), plain.log_prob(value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.entropy(), plain.entropy(), rtol=1e-12, atol=1e-12)
    assert q.event_shape == SHAPE
    assert q.batch_shape == ()
    assert not q.sample().requires_grad
    samples = q.rsample((4000,))
    assert samples.shape == (4000, *SHAPE)
    z = (samples - q.mean) / q.base_dist.scale
    assert bool((z.mean(0).abs() < 6 / math.sqrt(4000)).all())
    assert bool(((z.var(0) - 1).abs() < 6 * math.sqrt(2 / 4000)).all())
    assert q.expand((5,)).sample().shape == (5, *SHAPE)


def test_pruned_normals_count_what_is_kept():
    loc, log_scale = randn(2, 3), randn(2, 3)
    kept = torch.tensor([[True, False, True], [False, False, True]])
    q = PrunedNormal(FactorizedNormal(loc, log_scale), kept)
    small = FactorizedNormal(loc[kept], log_scale[kept])
    torch.manual_seed(0)
    draws = q.sample((4,))
    assert bool((draws[:, ~kept] == 0).all())
    assert bool((draws[:, kept] != 0).all())
    close(q.log_prob(draws), small.base_dist.log_prob(draws[:, kept]).sum(-1))
    zeros = torch.zeros(2, 3).double()
    prior = dist.Normal(zeros + 0.1, zeros + 2.0).to_event(2)
    smaller = dist.Normal(zeros[kept] + 0.1, zeros[kept] + 2.0).to_event(1)
    close(td.kl_divergence(q, prior), td.kl_divergence(small, smaller))
    mean, variance = independent_moments(q)
    assert torch.equal(mean, loc * kept)
    close(variance, (2 * log_scale).exp() * kept)
    assert torch.equal(center(q), mean)
    close(detached(q).log_prob(draws), q.log_prob(draws))
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, dist.Laplace(zeros, zeros + 1.0).to_event(2))
    with pytest.raises(NotImplementedError, match="one joint event"):
        q.expand(Size([2]))
