"""Adaptation: Stan's windows, Welford's recursion, dual averaging, and what a run finds by them."""

import math

import numpy as np
import pytest
import torch

from tests.oracles.densities import scaled_gaussian
from tyxe.samplers import HMC, NUTS, Length, Run
from tyxe.samplers.hamiltonian import reasonable_step_size
from tyxe.samplers.kernel import DualAveraging, Moments, windows
from tyxe.samplers.potential import Point, kinetic_energy, leapfrog

pytestmark = pytest.mark.usefixtures("double")

# Transitions from 75 (15 % below 150) to 50 (10 %) before the end, in windows of 25, 50, 100, ...
# each of which is stretched to the end where twice its size does not fit after it.
WINDOWS = {
    0: (0, 0, []),
    49: (0, 0, []),
    50: (7, 45, [44]),
    100: (15, 90, [89]),
    149: (22, 135, [134]),
    150: (75, 100, [99]),
    199: (75, 149, [148]),
    200: (75, 150, [99, 149]),
    300: (75, 250, [99, 149, 249]),
    500: (75, 450, [99, 149, 249, 449]),
    1000: (75, 950, [99, 149, 249, 449, 949]),
    2000: (75, 1950, [99, 149, 249, 449, 849, 1949]),
}


@pytest.mark.parametrize("length", WINDOWS)
def test_windows_are_those_of_the_rule(length):
    first, stop, expected = WINDOWS[length]
    collects, ends = windows(length)
    assert collects.shape == ends.shape == (length,)
    assert collects.nonzero().flatten().tolist() == list(range(first, stop))
    assert ends.nonzero().flatten().tolist() == expected
    schedule = NUTS().plan(Length(length))
    assert torch.equal(schedule[:, :2], torch.stack([collects, ends], -1))
    assert schedule[:, 2].nonzero().flatten().tolist() == ([length - 1] if length else [])


def test_running_moments_are_those_of_numpy():
    positions = 1e3 + torch.randn(37, 4, 3) * torch.tensor([1e-2, 1.0, 10.0])
    moments = Moments.start(positions[0])
    for position in positions:
        moments = moments.updated(position)
    plain = positions.numpy().var(0, ddof=1)
    np.testing.assert_allclose(moments.mean, positions.numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.squares / 36, plain, rtol=1e-9)
    shrunk = 37 / 42 * plain + 1e-3 * 5 / 42
    np.testing.assert_allclose(moments.variance(), shrunk, rtol=1e-9)
    one = Moments.start(torch.zeros(1, 2)).updated(torch.tensor([[3.0, -5.0]]))
    torch.testing.assert_close(one.variance(), torch.full((1, 2), 1e-3 * 5 / 6))


def test_dual_averaging_is_the_recursion_of_the_paper():
    first, target = 0.3, 0.8
    acceptances = torch.rand(50, 2)
    state = DualAveraging.start(torch.full((2,), first))
    steps, averages = [], []
    for acceptance in acceptances:
        state = state.updated(acceptance, target)
        steps.append(state.log_step)
        averages.append(state.log_average)
    for chain in range(2):
        # Hoffman, Gelman 2014, algorithm 5.
        gamma, t0, kappa, mu = 0.05, 10, 0.75, math.log(10 * first)
        h, log_average = 0.0, 0.0
        for m in range(1, 51):
            alpha = float(acceptances[m - 1, chain])
            h = (1 - 1 / (m + t0)) * h + 1 / (m + t0) * (target - alpha)
            log_step = mu - math.sqrt(m) / gamma * h
            eta = m**-kappa
            log_average = eta * log_step + (1 - eta) * log_average
            assert float(steps[m - 1][chain]) == pytest.approx(log_step, rel=1e-12)
            assert float(averages[m - 1][chain]) == pytest.approx(log_average, rel=1e-12)


@pytest.mark.parametrize("first", [1e-8, 1.0, 1e8])
def test_the_first_step_size_is_where_one_step_s_acceptance_crosses_the_threshold(first):
    scales = torch.tensor([0.01, 1.0])
    potential, chains = scaled_gaussian(scales), 20
    point = Point.at(potential, scales * torch.randn(chains, 2))
    noise, one = torch.randn(chains, 2), torch.ones(chains, 2)
    found = reasonable_step_size(potential, point, torch.full((chains,), first), one, noise)

    def is_accepted(step):
        after, turned = leapfrog(potential, point, noise, step[:, None], one)
        before = point.potential + kinetic_energy(noise, one)
        return before - after.potential - kinetic_energy(turned, one) > math.log(0.8)

    exponents = torch.log2(found / first)
    torch.testing.assert_close(exponents, exponents.round())
    # Doublings end at the first that is too large, halvings at the first that is not.
    grew = exponents > 0
    assert torch.equal(is_accepted(found), ~grew)
    assert torch.equal(is_accepted(torch.where(grew, found / 2, found * 2)), grew)


@pytest.mark.parametrize(("kernel", "target"), [(HMC, 0.95), (NUTS, 0.6)])
def test_a_warm_up_has_the_wanted_acceptance(kernel, target):
    chains, d, length = 64, 5, 100
    scales = torch.linspace(0.5, 2, d)
    options = {"num_steps": 3} if kernel is HMC else {"max_tree_depth": 4}
    made = kernel(step_size=1e-3, target_accept_prob=target, adapt_mass_matrix=False, **options)
    start = scales * torch.randn(chains, d)
    run = Run(made, scaled_gaussian(scales), start, num_samples=1, num_warmup=length)
    total, made_of = torch.zeros(chains), torch.zeros(chains)
    for transition in run.steps():
        is_warm = transition.done & (made_of < length)
        total += torch.where(is_warm, transition.statistics[:, 0], 0)
        made_of += is_warm
        # What dual averaging sees after m transitions is the mean error of all, by m / (m + 10).
        state, m = run._adaptation.averaging, made_of
        torch.testing.assert_close(state.error, (target * m - total) / (m + 10))
    assert (made_of == length).all()
    assert float((total / length).mean()) == pytest.approx(target, abs=0.05)
    torch.testing.assert_close(run.settings.step_size, state.log_average.exp())


def test_a_run_finds_a_known_mass_matrix():
    scales, chains, window = torch.logspace(-0.5, 0.5, 4), 128, 50
    start = scales * torch.randn(chains, 4)
    run = Run(NUTS(max_tree_depth=4), scaled_gaussian(scales), start, num_samples=1, num_warmup=200)
    list(run.steps())
    # The last window has 50 positions; undo what draws their variance to 1e-3.
    plain = (run.settings.inverse_mass * (window + 5) - 5e-3) / window
    ratio = plain / scales.square()
    error = ratio.std(0) / math.sqrt(chains)
    assert float(error.max()) < 0.05
    assert ((ratio.mean(0) - 1).abs() < 4 * error).all()


def test_what_is_not_to_adapt_stays():
    potential, start = scaled_gaussian(torch.tensor([0.5, 2.0])), torch.randn(3, 2)
    for step, mass in [(True, False), (False, True), (False, False)]:
        kernel = HMC(0.3, step, mass, num_steps=3)
        run = Run(kernel, potential, start, num_samples=1, num_warmup=60)
        list(run.steps())
        assert bool((run.settings.step_size != 0.3).all()) == step
        assert bool((run.settings.step_size == 0.3).all()) != step
        assert bool((run.settings.inverse_mass != 1).all()) == mass
        assert bool((run.settings.inverse_mass == 1).all()) != mass
