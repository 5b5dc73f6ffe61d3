"""Moments and centres of distributions, by registration."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td

from tests.oracles.normals import factorized, normal
from tyxe.distributions import center, deviation, independent_moments


@pytest.mark.parametrize(
    "wrap",
    [
        lambda q: q,
        lambda q: td.Independent(q, 1),
        lambda q: td.Independent(td.Independent(q, 1), 1),
    ],
)
def test_normals_have_moments_however_wrapped(wrap):
    q = normal()
    mean, variance = independent_moments(wrap(q))
    assert torch.equal(mean, q.loc)
    torch.testing.assert_close(variance, q.scale.square())
    assert torch.equal(center(wrap(q)), q.loc)


def test_factorized_normals_have_the_moments_of_normals():
    q = factorized()
    mean, variance = independent_moments(q)
    torch.testing.assert_close(mean, q.mean)
    torch.testing.assert_close(variance, q.base_dist.variance)
    assert torch.equal(center(q), q.mean)


ZERO, ONE = torch.zeros(2), torch.ones(2)
SYMMETRIC = {
    "Laplace": td.Laplace(ONE, ONE),
    "StudentT": td.StudentT(3.0, ONE, ONE),
    "Cauchy": td.Cauchy(ONE, ONE),
    "Uniform": td.Uniform(ZERO, 2 * ONE),
    "Normal": td.Normal(ONE, ONE),
}


@pytest.mark.parametrize("q", SYMMETRIC.values(), ids=SYMMETRIC.keys())
def test_centres_are_centres_of_symmetry(q):
    middle = center(q)
    offset = torch.rand(2)
    torch.testing.assert_close(q.log_prob(middle + offset), q.log_prob(middle - offset))
    if not isinstance(q, td.Normal):
        assert independent_moments(q) is None


@pytest.mark.parametrize(
    "q",
    [
        td.MultivariateNormal(ZERO, torch.eye(2)),
        td.Gamma(ONE, ONE),
        td.LogNormal(ZERO, ONE),
        dist.Delta(ZERO),
        td.TransformedDistribution(td.Normal(ZERO, ONE), [td.ExpTransform()]),
    ],
    ids=lambda q: type(q).__name__,
)
def test_others_are_never_treated(q):
    assert independent_moments(q) is None
    assert center(q) is None


@pytest.mark.parametrize("q", [*SYMMETRIC.values(), factorized()], ids=[*SYMMETRIC, "Factorized"])
def test_deviations_are_draws_about_the_centre(q):
    torch.manual_seed(1)
    direct = torch.stack([deviation(q) for _ in range(4000)]).flatten(1)
    torch.manual_seed(2)
    drawn = torch.stack([q.sample() - center(q) for _ in range(4000)]).flatten(1)
    # Cauchy has no moments: compare quartiles, of standard error below 1.4 / sqrt(n) each for a
    # density of at least 0.1 there.
    for p in (0.25, 0.5, 0.75):
        difference = direct.quantile(p, 0) - drawn.quantile(p, 0)
        assert bool((difference.abs() < 6 * math.sqrt(2 * p * (1 - p) / 4000) / 0.1).all())
