"""The integrators: reversible, of their order, on their manifold; and the refreshed directions."""

import math

import pytest
import torch

from tyxe.samplers import batched
from tyxe.samplers.potential import Point, kinetic_energy, leapfrog, minimal_norm, refreshed

pytestmark = pytest.mark.usefixtures("double")

D = 4


def energy(w):
    """Return a potential without symmetry, all of whose derivatives are bounded on a ball."""
    return 0.5 * w.square().sum() + torch.sin(2 * w[0]) * w[1] + 0.3 * (w[2] * w[3]).square()


POTENTIAL = batched(energy, torch.zeros(1, D))


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def test_leapfrog_backwards_undoes_it():
    start, momentum = Point.at(POTENTIAL, torch.randn(5, D)), torch.randn(5, D)
    inverse_mass, step = 0.5 + torch.rand(5, D), torch.rand(5, 1)
    point, p = start, momentum
    for _ in range(10):
        point, p = leapfrog(POTENTIAL, point, p, step, inverse_mass)
    assert float((point.position - start.position).norm()) > 0.1
    for _ in range(10):
        point, p = leapfrog(POTENTIAL, point, p, -step, inverse_mass)
    torch.testing.assert_close(point, start, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(p, momentum, rtol=1e-9, atol=1e-9)


def test_minimal_norm_with_the_direction_reversed_undoes_it():
    start, velocity = Point.at(POTENTIAL, torch.randn(5, D)), unit(torch.randn(5, D))
    step = 0.3 * torch.rand(5, 1)
    point, u, there = minimal_norm(POTENTIAL, start, velocity, step)
    back, u, again = minimal_norm(POTENTIAL, point, -u, step)
    assert float((point.position - start.position).norm()) > 0.1
    torch.testing.assert_close(back, start, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(-u, velocity, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(again, -there, rtol=1e-10, atol=1e-10)


def leapfrog_error(step):
    start, momentum, one = torch.linspace(-1, 1, D)[None], torch.ones(1, D), torch.ones(1, D)
    point = Point.at(POTENTIAL, start)
    after, p = leapfrog(POTENTIAL, point, momentum, torch.tensor([[step]]), one)
    before = point.potential + kinetic_energy(momentum, one)
    return float((after.potential + kinetic_energy(p, one) - before).abs())


def minimal_norm_error(step):
    point = Point.at(POTENTIAL, torch.linspace(-1, 1, D)[None])
    velocity = unit(torch.ones(1, D))
    return float(minimal_norm(POTENTIAL, point, velocity, torch.tensor([[step]]))[2].abs())


@pytest.mark.parametrize("error", [leapfrog_error, minimal_norm_error])
def test_the_energy_error_of_a_step_is_of_third_order(error):
    ratios = [error(step) / error(step / 2) for step in (0.02, 0.01, 0.005)]
    # 2^3, nearer with each halving.
    assert ratios[-1] == pytest.approx(8, rel=0.02)
    assert abs(ratios[-1] - 8) <= abs(ratios[0] - 8)


def test_minimal_norm_is_the_scheme_written_with_hyperbolic_functions():
    """Against the formulas of METHODS as they are written there, which can overflow."""
    point, u = Point.at(POTENTIAL, torch.randn(6, D)), unit(torch.randn(6, D))
    step, b = 0.2 * torch.rand(6, 1), 0.1931833275037836
    found = minimal_norm(POTENTIAL, point, u, step)

    def kick(x, u, time):
        g = -torch.func.vmap(torch.func.grad(energy))(x)
        size = g.norm(dim=-1, keepdim=True)
        e, delta = g / size, time * size / (D - 1)
        along = (e * u).sum(-1, keepdim=True)
        below = delta.cosh() + along * delta.sinh()
        turned = (u + e * (delta.sinh() + along * (delta.cosh() - 1))) / below
        return turned, (D - 1) * below.log()[:, 0]

    x = point.position
    u, first = kick(x, u, b * step)
    x = x + step / 2 * u
    u, second = kick(x, u, (1 - 2 * b) * step)
    x = x + step / 2 * u
    u, third = kick(x, u, b * step)
    change = torch.func.vmap(energy)(x) - point.potential + first + second + third
    torch.testing.assert_close(found[0].position, x)
    torch.testing.assert_close(found[1], u)
    torch.testing.assert_close(found[2], change)


def test_directions_stay_on_the_sphere():
    point, u = Point.at(POTENTIAL, torch.randn(5, D)), unit(torch.randn(5, D))
    for _ in range(200):
        point, u, _ = minimal_norm(POTENTIAL, point, u, torch.full((5, 1), 0.2))
    torch.testing.assert_close(u.norm(dim=-1), torch.ones(5), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e15), (torch.float64, 1e150)])
def test_a_huge_force_turns_the_direction_along_itself_without_overflow(dtype, size):
    force = torch.randn(6, D, dtype=dtype)

    def steep(w):
        return -size * (force * w).sum(-1), -size * force

    start = Point.at(steep, torch.zeros(6, D, dtype=dtype))
    u = unit(torch.randn(6, D, dtype=dtype))
    after, turned, error = minimal_norm(steep, start, u, torch.ones(6, 1, dtype=dtype))
    torch.testing.assert_close(turned, unit(force))
    # The first half-step of velocity turns it, so that all of the step is along the force: what the
    # potential loses, size * |force|, is what the kinetic energy gains, but for a first part.
    assert error.isfinite().all()
    torch.testing.assert_close(after.position, unit(force))
    assert (error.abs() <= 1e-5 * size * force.norm(dim=-1)).all()


@pytest.mark.parametrize("parts", [1, 2, 10])
def test_refreshed_directions_forget_with_the_length_they_say(parts):
    """Correlated by `exp(-time / length)` with their start, however the time is divided."""
    d, chains, time, length = 2000, 400, 1.5, 2.0
    start = u = unit(torch.randn(chains, d))
    for _ in range(parts):
        noise, part = torch.randn(chains, d), torch.full((chains, 1), time / parts)
        u = refreshed(u, noise, part, torch.full((chains, 1), length))
    torch.testing.assert_close(u.norm(dim=-1), torch.ones(chains))
    along = (start * u).sum(-1)
    # The standard error, and the terms of order 1/d that the formula leaves out.
    tolerance = 4 * float(along.std()) / math.sqrt(chains) + 3 / d
    assert float(along.mean()) == pytest.approx(math.exp(-time / length), abs=tolerance)


def test_without_a_force_nothing_turns():
    flat = lambda w: (torch.zeros(len(w)), torch.zeros_like(w))  # noqa: E731
    u = unit(torch.randn(3, D))
    after, same, error = minimal_norm(flat, Point.at(flat, torch.zeros(3, D)), u, torch.ones(3, 1))
    torch.testing.assert_close(same, u)
    torch.testing.assert_close(after.position, u)
    torch.testing.assert_close(error, torch.zeros(3))
