"""FactorizedNormal is an independent Normal."""

import math

import torch
import torch.distributions as td

from tests.oracles.normals import SHAPE, factorized


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
