"""HMC: its transitions against a plain one, and stationarity from exact starts."""

import math

import pytest
import torch

from tests.oracles.densities import (
    cells_p_value,
    correlated_gaussian,
    funnel,
    mixture,
    scaled_gaussian,
)
from tyxe.samplers import HMC, MCLMC, NUTS, Randomness, Run
from tyxe.samplers.hamiltonian import Settings
from tyxe.samplers.integrators import Point

pytestmark = pytest.mark.usefixtures("double")


def test_a_transition_is_that_of_a_plain_loop():
    chains, d, steps = 200, 2, 4
    density = correlated_gaussian()
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
    ("make", "step_size"), [(correlated_gaussian, 0.7), (funnel, 0.4), (mixture, 0.5)]
)
def test_exact_draws_stay_exact(make, step_size):
    density = make()
    starts = density.draw(10_000)
    kernel = HMC(step_size=step_size, num_steps=5, adapt_step_size=False)
    run = Run(kernel, density.potential, starts, num_samples=5, seed=1)
    list(run.steps())
    acceptance = float(run.kept.statistics[..., 0].mean())
    assert 0.3 < acceptance < 0.99
    moved = run.kept.positions[:, -1]
    assert cells_p_value(density.uniform(moved)) > 1e-3
    u, v = density.uniform(starts)[:, -1], density.uniform(moved)[:, -1]
    assert abs(float(torch.corrcoef(torch.stack([u, v]))[0, 1])) < 0.5


def test_the_test_of_cells_sees_a_chain_that_accepts_everything():
    """The chi-square test has the power to see the bias of a leapfrog without its accept step."""
    density = correlated_gaussian()
    kernel = HMC(step_size=0.7, num_steps=5, adapt_step_size=False)

    class Always(HMC):
        def step(self, potential, state, settings, random):
            uniforms = torch.zeros_like(random.uniforms)
            return super().step(potential, state, settings, random._replace(uniforms=uniforms))

    for made, is_exact in [(kernel, True), (Always(0.7, False, num_steps=5), False)]:
        run = Run(made, density.potential, density.draw(10_000), num_samples=5, seed=1)
        list(run.steps())
        assert (cells_p_value(density.uniform(run.kept.positions[:, -1])) > 1e-3) == is_exact


def test_a_transition_into_nothing_is_rejected():
    def walled(w):
        value, gradient = scaled_gaussian(torch.ones(2))(w)
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


@pytest.mark.parametrize("kind", [HMC, NUTS, MCLMC])
@pytest.mark.parametrize("number", [0, -1.0, math.inf, math.nan])
def test_a_step_size_that_is_none_is_refused(kind, number):
    with pytest.raises(ValueError, match=r"step_size is .*; expected a number above 0"):
        kind(step_size=number)


@pytest.mark.parametrize("kind", [HMC, NUTS, MCLMC])
@pytest.mark.parametrize("value", ["0.1", None, True, [0.1]])
def test_a_step_size_of_another_type_is_refused(kind, value):
    with pytest.raises(TypeError, match=r"step_size is .*; expected a number above 0"):
        kind(step_size=value)


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (HMC, {"num_steps": 0}, ValueError, "num_steps is 0; expected 1 or more"),
        (HMC, {"num_steps": 2.5}, TypeError, "num_steps is 2.5; expected an integer"),
        (
            NUTS,
            {"target_accept_prob": 1},
            ValueError,
            r"is 1; expected a number above 0 and below 1",
        ),
        (
            NUTS,
            {"target_accept_prob": 0},
            ValueError,
            r"is 0; expected a number above 0 and below 1",
        ),
        (NUTS, {"target_accept_prob": "high"}, TypeError, "target_accept_prob is 'high'"),
        (NUTS, {"max_tree_depth": 0}, ValueError, "max_tree_depth is 0; expected 1 or more"),
        (NUTS, {"max_tree_depth": 31}, ValueError, "max_tree_depth is 31; expected 1 to 30"),
        (NUTS, {"max_tree_depth": 2.5}, TypeError, "max_tree_depth is 2.5; expected an integer"),
        (NUTS, {"adapt_step_size": "no"}, TypeError, "adapt_step_size is 'no'; expected True or"),
        (HMC, {"adapt_mass_matrix": 0}, TypeError, "adapt_mass_matrix is 0; expected True or"),
        (MCLMC, {"momentum_length": 0.0}, ValueError, "momentum_length is 0.0"),
        (MCLMC, {"energy_variance": -0.1}, ValueError, "energy_variance is -0.1"),
        (MCLMC, {"energy_variance": (0.5, 0.0)}, ValueError, "energy_variance is 0.0"),
        (MCLMC, {"energy_variance": (0.5, 0.1, 0.1)}, ValueError, "has 3 numbers; expected one"),
        (MCLMC, {"energy_variance": [0.5, 0.1]}, TypeError, "energy_variance is a list"),
        (MCLMC, {"memory": 1}, ValueError, r"memory is 1; expected a number above 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


def test_a_short_warm_up_is_spoken_of_where_something_adapts():
    assert NUTS().check(150) is None
    assert NUTS(adapt_step_size=False, adapt_mass_matrix=False).check(0) is None
    assert "warmup_steps=149 is too short to adapt step sizes and mass" in NUTS().check(149)
    assert "adapt step sizes:" in HMC(adapt_mass_matrix=False).check(10)
    assert "adapt mass matrices:" in HMC(adapt_step_size=False).check(10)
    assert "warmup_steps=999 is too short for MCLMC" in MCLMC().check(999)
    assert MCLMC().check(1000) is None
