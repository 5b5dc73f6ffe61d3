"""HMC against a plain transition; and HMC and NUTS keep exact draws exact."""

import math

import pytest
import torch

from tests.oracles import densities
from tyxe.samplers import HMC, NUTS, Randomness, Run
from tyxe.samplers.hamiltonian import Settings
from tyxe.samplers.potential import Point

pytestmark = pytest.mark.usefixtures("double")


def test_a_transition_is_that_of_a_plain_loop():
    chains, d, steps = 200, 2, 4
    density = densities.correlated_gaussian()
    kernel = HMC(num_steps=steps)
    start, noise, uniforms = density.draw(chains), torch.randn(chains, d), torch.rand(3, chains)
    step_size, inverse_mass = 0.2 + 1.2 * torch.rand(chains), 0.5 + torch.rand(chains, d)
    state = kernel.begin(Point.at(density.potential, start), noise, uniforms[2], inverse_mass)
    for number in range(steps):
        last = number == steps - 1
        # Only the last step's coin decides.
        random = Randomness(torch.randn(1, chains, d), uniforms if last else torch.rand(3, chains))
        settings = Settings(step_size, inverse_mass)
        state, transition = kernel.step(density.potential, state, settings, random)
        assert bool(transition.done.all()) == bool(transition.done.any()) == last

    accepted = 0
    for chain in range(chains):
        mass = 1 / inverse_mass[chain]
        x, p = start[chain], noise[chain] * mass.sqrt()

        def energy(x, p, mass=mass):
            value, gradient = density.potential(x[None])
            return float(value) + 0.5 * float((p * p / mass).sum()), gradient[0]

        before, gradient = energy(x, p)
        for _ in range(steps):
            p = p - 0.5 * step_size[chain] * gradient
            x = x + step_size[chain] * p / mass
            gradient = energy(x, p)[1]
            p = p - 0.5 * step_size[chain] * gradient
        probability = min(1.0, math.exp(before - energy(x, p)[0]))
        is_accepted = float(uniforms[0, chain]) < probability
        accepted += is_accepted
        torch.testing.assert_close(transition.position[chain], x if is_accepted else start[chain])
        assert float(transition.statistics[chain, 0]) == pytest.approx(probability)
        assert float(transition.statistics[chain, 1]) == steps
    assert 0 < accepted < chains


@pytest.mark.parametrize(
    ("kernel", "make", "num_samples"),
    [
        (HMC(0.7, False, num_steps=5), densities.correlated_gaussian, 5),
        (HMC(0.4, False, num_steps=5), densities.funnel, 5),
        (HMC(0.5, False, num_steps=5), densities.mixture, 5),
        (NUTS(0.7, False, max_tree_depth=5), densities.correlated_gaussian, 3),
        (NUTS(0.3, False, max_tree_depth=5), densities.funnel, 3),
        (NUTS(0.4, False, max_tree_depth=5), densities.mixture, 3),
    ],
)
def test_exact_draws_stay_exact(kernel, make, num_samples):
    density = make()
    starts = density.draw(5_000)
    run = Run(kernel, density.potential, starts, num_samples, seed=1)
    list(run.steps())
    assert 0.3 < float(run.kept.statistics[..., 0].mean()) < 0.99
    moved = run.kept.positions[:, -1]
    assert densities.cells_p_value(density.uniform(moved)) > 1e-3
    # And they have moved.
    u, v = density.uniform(starts)[:, -1], density.uniform(moved)[:, -1]
    assert abs(float(torch.corrcoef(torch.stack([u, v]))[0, 1])) < 0.5


def test_a_transition_into_nothing_is_rejected():
    def walled(w):
        value, gradient = densities.scaled_gaussian(torch.ones(2))(w)
        return torch.where(w[:, 0] > 1, torch.nan, value), gradient

    # Beyond the wall the gradient is as before: only the potential says that there is nothing.
    kernel = HMC(step_size=0.9, num_steps=3, adapt_step_size=False)
    run = Run(kernel, walled, torch.zeros(500, 2), num_samples=20)
    list(run.steps())
    assert float(run.kept.positions[..., 0].max()) <= 1
    assert run.kept.potentials.isfinite().all()
    acceptance, _, diverged = run.kept.statistics.unbind(-1)
    assert 0 < float((diverged == 1).double().mean()) < 1
    assert (acceptance[diverged == 1] == 0).all()
