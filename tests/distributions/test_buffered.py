"""Distributions held by modules, and detached ones."""

import io
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

from tyxe.distributions import FactorizedNormal
from tyxe.distributions.buffered import BufferedDistribution, detached


def transformed():
    q = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1),
        [td.AffineTransform(torch.ones(2), torch.full((2,), 2.0)), td.ExpTransform()],
    )
    # Evaluated once, its transforms know their inverses, which know their transforms.
    q.log_prob(q.sample())
    return q


STORED = {
    "normal": lambda: td.Normal(torch.randn(2), torch.rand(2) + 0.5),
    "expanded": lambda: dist.Normal(0.0, 2.0).expand((4, 3)).to_event(2),
    "independent": lambda: dist.Laplace(torch.randn(3), 1.0).to_event(1),
    "student": lambda: dist.StudentT(torch.tensor(3.0), torch.zeros(2), torch.ones(2)),
    "multivariate": lambda: dist.MultivariateNormal(torch.zeros(2), 2 * torch.eye(2)),
    "low rank": lambda: dist.LowRankMultivariateNormal(
        torch.zeros(3), torch.randn(3, 1), torch.ones(3)
    ),
    "gamma": lambda: dist.Gamma(torch.tensor(2.0), torch.tensor(3.0)),
    "half cauchy": lambda: dist.HalfCauchy(torch.ones(2)),
    "log normal": lambda: dist.LogNormal(torch.zeros(2), 1.0),
    "transformed": transformed,
    "mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])), dist.Normal(torch.zeros(2), torch.ones(2))
    ),
    "factorized": lambda: FactorizedNormal(torch.zeros(2), torch.zeros(2)),
}


def same(p, q):
    value = p.sample()
    found = q.log_prob(value.to(q.sample().dtype)).double()
    torch.testing.assert_close(found, p.log_prob(value).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", STORED.values(), ids=STORED.keys())
def test_it_is_the_distribution_wherever_it_goes(make):
    original = make()
    stored, other = BufferedDistribution(original), BufferedDistribution(make())
    same(original, stored.distribution)
    same(original, detached(original))
    assert stored.distribution.batch_shape == original.batch_shape
    assert stored.distribution.event_shape == original.event_shape
    torch.save(stored.state_dict(), file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    same(original, other.distribution)
    double = BufferedDistribution(original, like=torch.zeros(1).double())
    assert double.distribution.sample().dtype == torch.float64
    same(original, double.distribution)
    same(original, pickle.loads(pickle.dumps(stored)).distribution)
    assert stored.double().distribution.sample().dtype == torch.float64
    same(original, stored.float().distribution)


def test_expanded_tensors_take_no_room():
    stored = BufferedDistribution(dist.Normal(0.0, 1.0).expand((100, 100)).to_event(2))
    assert sum(buffer.numel() for buffer in stored.buffers()) == 2


def test_a_posterior_loads_where_one_number_stood():
    numbers = BufferedDistribution(STORED["expanded"]())
    posterior = dist.Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.1).to_event(2)
    numbers.load_state_dict(BufferedDistribution(posterior).state_dict())
    same(posterior, numbers.distribution)


def test_another_kind_or_shape_is_refused():
    stored = BufferedDistribution(dist.Normal(0.0, 1.0).expand((4,)).to_event(1))
    for other, message in (
        (dist.Laplace(torch.zeros(4), 1.0), r"Independent\(Normal\) here and Independent\(Laplace"),
        (dist.Normal(torch.zeros(5), 1.0), "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            stored.load_state_dict(BufferedDistribution(other.to_event(1)).state_dict())
    assert stored.distribution.mean.unique() == 0.0


@pytest.mark.parametrize("keep", [detached, lambda q: BufferedDistribution(q).distribution])
def test_what_is_kept_has_neither_gradient_nor_shared_storage(keep):
    loc = nn.Parameter(torch.zeros(3))
    kept = keep(td.Independent(td.Laplace(loc, torch.ones(3)), 1))
    before = kept.log_prob(torch.full((3,), 0.25))
    assert not before.requires_grad
    with torch.no_grad():
        loc.add_(1.0)
    assert torch.equal(kept.log_prob(torch.full((3,), 0.25)), before)
