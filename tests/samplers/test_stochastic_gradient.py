"""SGLD and SGHMC: exact stationary moments of the discrete dynamics, schedules, divergence."""

import math

import pytest
import torch

from tyxe.samplers import SGHMC, SGLD, Length, Run


def normal(position):
    return 0.5 * position.square().sum(-1), position


def stationary(rate, friction):
    """Return the variances of position and velocity under a standard normal."""
    a, eta = friction, rate
    # The next position and velocity from those before: v' = (1 - a) v - eta w + noise, w' = w + v'.
    step = torch.tensor([[1 - eta, 1 - a], [-eta, 1 - a]], dtype=torch.double)
    noise = torch.full([2, 2], 2 * a * eta, dtype=torch.double)
    twice = torch.eye(4, dtype=torch.double) - torch.kron(step, step)
    return torch.linalg.solve(twice, noise.flatten()).view(2, 2).diagonal()


CHAINS = 100_000
# Of a mean of squares, relative to it.
FOUR_ERRORS = 4 * math.sqrt(2 / CHAINS)


def found_by(kernel):
    """Return the mean squares of positions and velocities after steps that forget the start."""
    run = Run(kernel, normal, torch.randn(CHAINS, 1), 1, num_warmup=79, seed=3)
    before = last = run.starts
    for transition in run.steps():
        before, last = last, transition.position
    return torch.stack([last, last - before]).double().square().mean((1, 2))


@pytest.mark.parametrize("friction", [1.0, 0.5, 0.3])
def test_moments_are_those_of_the_discrete_dynamics_and_their_bias_halves_with_the_rate(friction):
    """The exact biases halve, and are larger than the errors by which chains may differ."""
    biases = []
    for rate in (0.16, 0.08):
        found = found_by(SGLD(rate) if friction == 1 else SGHMC(rate, friction=friction))
        exact = stationary(rate, friction)
        assert ((found / exact - 1).abs() < FOUR_ERRORS).all()
        biases.append(float(exact[0]) - 1)
    assert biases[1] > FOUR_ERRORS
    assert 1.9 < biases[0] / biases[1] < 2.2


def test_cycles_are_cosines_without_noise_at_first():
    kernel = SGHMC(0.5, schedule="cyclical", num_cycles=3, exploration=0.75)
    noises = []
    runs = [Run(kernel, normal, torch.ones(1, 1), 6, 54, seed=seed) for seed in (0, 1)]
    paths = [torch.cat([transition.position for transition in run.steps()]) for run in runs]
    assert len(paths[0]) == 60
    assert torch.equal(paths[0][:15], paths[1][:15])
    assert not torch.equal(paths[0][15], paths[1][15])
    plan = kernel.plan(Length(54, 6))
    for step in range(1, 60):  # of the formula, counted from 1 there
        inside = (step % 20) / 20
        expected = 0.5 * (math.cos(math.pi * inside) + 1)
        torch.testing.assert_close(plan[step - 1, 0], torch.tensor(expected).double())
        assert plan[step - 1, 1] == (inside >= 0.75)
        noises.append(inside >= 0.75)
    assert sum(noises) == 15
    # Two samples from the end of each.
    assert kernel.kept(Length(54, 6)).tolist() == [19, 20, 39, 40, 59, 60]
    kept_rates = runs[0].kept.statistics[0, :, 0]
    expected = 0.5 * 0.5 * torch.tensor([math.cos(math.pi * s / 20) + 1 for s in (18, 19)] * 3)
    torch.testing.assert_close(kept_rates, expected)


def test_polynomial_rates():
    kernel = SGLD(0.2, schedule="polynomial", power=0.6, offset=10.0)
    run = Run(kernel, normal, torch.zeros(1, 1), 5, num_warmup=0, seed=0)
    assert len(list(run.steps())) == 5
    expected = 0.2 * (1 + torch.arange(5) / 10.0) ** -0.6
    torch.testing.assert_close(run.kept.statistics[0, :, 0], expected)


def test_samples_that_no_cycle_ends_with():
    kernel = SGLD(0.1, schedule="cyclical")
    message = r"steps is 100; .* for 4 cycles, .* 20% give 40 samples .* warmup_steps=180 or more"
    with pytest.raises(ValueError, match=message):
        Run(kernel, normal, torch.zeros(1, 1), 40, num_warmup=60)
    length = Length(kernel.default_warmup(40, 3), 40, 3)
    steps = kernel.kept(length)
    assert len(steps) == 40
    # The noise of the step to each is that of the plan's row before.
    assert kernel.plan(length)[steps - 2, 1].all()


def quartic(position):
    return 0.25 * position.square().square().sum(-1), position**3


def test_a_rate_that_diverges_leaves_the_last_good_sample():
    """Where the potential is steep a rate is too large that was not at the start."""
    starts = torch.tensor([[0.5, 0.1], [0.3, 0.2]])
    run = Run(SGHMC(0.4, friction=0.9), quartic, starts, 100_000, seed=0)
    with pytest.raises(RuntimeError, match=r"SGHMC diverged at the rate 0.4, .* lower lr=0.4"):
        list(run.steps())
    good = run.num_kept
    assert 1 < good < int(run.transitions.min()) - 1
    # The scale of a potential of 5 nats; some steps later it was 1e6.
    assert run.kept.potentials[:, :good].max() < 10 * (1 + 2 + 1)
    assert run.kept.potentials[:, good].max() > 10 * 2


@pytest.mark.parametrize("kernel", [SGLD(2.1), SGHMC(4.0)])
def test_a_rate_that_diverges_at_once_leaves_no_sample_of_the_growth(kernel):
    run = Run(kernel, normal, torch.ones(3, 2).double(), 5000, num_warmup=10, seed=0)
    with pytest.raises(RuntimeError, match="diverged"):
        list(run.steps())
    assert int(run.transitions.min()) > 10
    assert run.num_kept == 0


def test_clipping_bounds_a_step():
    kernel = SGLD(0.1, clip_norm=0.5, schedule="cyclical", num_cycles=1)
    run = Run(kernel, normal, torch.tensor([[30.0, 40.0]]), 1, num_warmup=9)
    first = next(run.steps())
    torch.testing.assert_close(first.position, torch.tensor([[30.0 - 0.03, 40.0 - 0.04]]))
    assert first.statistics[0].tolist() == pytest.approx([0.1, 50.0])
