"""SWAG's guide: moments of known snapshots, the contract, and copies in other types."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from tests.oracles.programs import program
from tyxe.guides import SWAGGuide
from tyxe.testing import check_guide

RANK, COUNT = 3, 7


def trail(count=COUNT, dtype=torch.float64):
    """Return weights `(count, 8)` far from zero, where a second moment loses its digits."""
    generator = torch.Generator().manual_seed(0)
    return 100 + torch.randn(count, 8, generator=generator, dtype=dtype)


def built(module=None, rank=RANK, weights=()):
    guide = SWAGGuide(program(nn.Linear(3, 2).double()) if module is None else module, rank=rank)
    for vector in weights:
        guide.collect(guide.blocks.unflatten(vector))
    return guide


def covariance(weights, rank=RANK):
    """Return `1/2 (diag(s^2) + D D^T / (K - 1))` by the formulas of the paper, from all weights."""
    variance = weights.square().mean(0) - weights.mean(0).square()
    means = weights.cumsum(0) / torch.arange(1.0, len(weights) + 1)[:, None]
    last = (weights - means)[-rank:]
    return (variance.diag() + last.T @ last / (rank - 1)) / 2


def joint(guide):
    (found,) = guide.joints()
    return found


@pytest.mark.parametrize("count", [RANK, COUNT])
def test_moments_of_a_known_trail(count):
    weights = trail(count)
    q = joint(built(weights=weights))
    torch.testing.assert_close(q.mean, weights.mean(0))
    expected = covariance(weights)
    torch.testing.assert_close(q.precision.operator.to_dense(), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(q.variance, expected.diagonal(), rtol=1e-9, atol=1e-10)
    exact = torch.distributions.MultivariateNormal(q.mean, expected)
    torch.testing.assert_close(q.log_prob(weights), exact.log_prob(weights))


def test_variances_far_from_zero_in_float32():
    weights = trail(50, torch.float32)
    q = joint(built(program(nn.Linear(3, 2)), weights=weights))
    expected = covariance(weights.double()).diagonal().float()
    torch.testing.assert_close(q.variance, expected, rtol=1e-3, atol=0)


def test_a_weight_that_does_not_move_has_a_variance():
    weights = trail()
    weights[:, 2] = 1.5
    q = joint(built(weights=weights))
    assert bool(q.variance.isfinite().all())
    assert 0 < q.variance[2] < 1e-20
    assert q.rsample((10,))[:, 2].allclose(torch.tensor(1.5).double())
    assert q.precision.logdet().isfinite()


@pytest.mark.parametrize("extra", [0, 4])
def test_contract(extra):
    check_guide(
        functools.partial(built, weights=trail(RANK + extra)), program(nn.Linear(3, 2).double())
    )


@pytest.mark.parametrize("count", range(RANK))
def test_no_posterior_of_too_few_snapshots(count):
    guide = built(weights=trail(count))
    message = f"{count} snapshots for rank=3.*call fit or collect"
    for use in (guide, guide.median, guide.get_detached_distributions):
        with pytest.raises(RuntimeError, match=message):
            use()


def test_a_snapshot_that_is_not_finite_changes_nothing():
    guide = built(weights=trail())
    before = copy.deepcopy(guide.state_dict())
    bad = trail()[0]
    bad[-1] = torch.nan
    with pytest.raises(ValueError, match=r"net.bias ranges from nan to nan; expected finite"):
        guide.collect(guide.blocks.unflatten(bad))
    for name, value in guide.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("count", [0, 1, RANK, COUNT])
def test_copies_go_on_collecting(count):
    guide = built(weights=trail()[:count])
    loaded = built()
    loaded.load_state_dict(guide.state_dict())
    copies = [loaded, copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))]
    for other in [guide, *copies]:
        for vector in trail()[count:]:
            other.collect(other.blocks.unflatten(vector))
    for other in copies:
        torch.testing.assert_close(joint(other).variance, joint(guide).variance, rtol=0, atol=0)


def test_a_state_of_another_rank_is_refused():
    with pytest.raises(RuntimeError, match=r"SWAGGuide\(rank=4\)|size mismatch"):
        built(rank=4).load_state_dict(built().state_dict())


def test_half_precision_keeps_its_snapshots():
    guide = built(program(nn.Linear(3, 2)), weights=trail(dtype=torch.float32))
    before = joint(guide).variance
    guide.to(torch.bfloat16)
    assert guide.locs["weight"].dtype == torch.bfloat16
    torch.testing.assert_close(joint(guide).variance, before, rtol=0, atol=0)
    assert joint(guide.double()).variance.dtype == torch.float64
