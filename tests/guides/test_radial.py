"""The radial posterior: a density with the entropy, moments and gradients that it says."""

import math

import pytest
import torch
import torch.distributions as td
import torch.nn as nn

from tyxe.guides.normal import Radial
from tyxe.testing.asserts import assert_within


def radial(*shape):
    loc = torch.randn(shape).double()
    return Radial(loc, torch.rand(shape).double() + 0.5)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_in_one_dimension_it_is_the_normal(shape):
    q = radial(*shape)
    for value in (*q.sample((20,)), q.loc):
        expected = td.Normal(q.loc, q.scale).log_prob(value).sum()
        torch.testing.assert_close(q.log_prob(value), expected)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 3)])
def test_the_density_integrates_to_one_in_few_dimensions(shape):
    q = radial(*shape)
    size = q.loc.numel()
    # The importance weights p / q of a radial law and a spherical t of the same centre are
    # bounded near the centre by a proposal with a denser middle: a radius of |N(0, 2)|.
    count = 40000
    direction = torch.randn(count, size).double()
    direction /= direction.norm(dim=-1, keepdim=True)
    radius = 2 * torch.randn(count, 1).double().abs()
    values = q.loc + q.scale * (direction * radius).reshape(count, *shape)
    log_area = math.log(2) + size / 2 * math.log(math.pi) - math.lgamma(size / 2)
    log_proposal = (
        td.HalfNormal(torch.tensor(2.0).double()).log_prob(radius).squeeze(-1)
        - log_area
        - (size - 1) * radius.squeeze(-1).log()
        - q.scale.log().sum()
    )
    weights = (q.log_prob(values) - log_proposal).exp()
    assert abs(weights.mean() - 1) < 6 * weights.std() / math.sqrt(count)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (50,)])
def test_entropy_and_moments_of_the_radial_posterior(shape):
    q = radial(*shape)
    samples = q.sample((20000,))
    assert samples.shape == (20000, *shape)
    torch.testing.assert_close(q.variance, q.scale.square() / q.loc.numel())
    # The distance from the centre is half-normal, whatever the dimension.
    distance = ((samples - q.loc) / q.scale).reshape(20000, -1).norm(dim=1)
    for values, expected in (
        (samples, q.mean),
        ((samples - q.mean).square(), q.variance),
        (-q.log_prob(samples), q.entropy()),
        (distance, torch.tensor(math.sqrt(2 / math.pi)).double()),
    ):
        assert_within(values.mean(0), expected, values.std(0) / math.sqrt(20000), "mean")


def test_radial_directions_are_uniform():
    q = Radial(torch.zeros(3).double(), torch.ones(3).double())
    directions = nn.functional.normalize(q.sample((20000,)), dim=-1)
    moments = directions.T @ directions / len(directions)
    # Variance of a product of coordinates on the sphere is below 1/5.
    assert bool(((moments - torch.eye(3) / 3).abs() < 6 * math.sqrt(0.2 / 20000)).all())


def test_radial_draws_have_exact_gradients():
    loc = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)

    def draw(loc, scale):
        torch.manual_seed(0)
        return Radial(loc, scale).rsample((3,))

    assert torch.autograd.gradcheck(draw, (loc, scale))

    def density(loc, scale):
        return Radial(loc, scale).log_prob(torch.arange(4.0).double().reshape(2, 2) + 0.5)

    assert torch.autograd.gradcheck(density, (loc, scale))
    with pytest.raises(NotImplementedError, match="one joint event"):
        Radial(loc, scale).expand((2,))
