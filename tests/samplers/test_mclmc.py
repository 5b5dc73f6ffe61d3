"""MCLMC: its step, its tuning, and undone steps."""

import math
import re

import pytest
import torch

from tests.oracles.densities import cells_p_value, scaled_gaussian
from tyxe.samplers import MCLMC, Length, Randomness, Run, Transition
from tyxe.samplers.mclmc import MCLMCState, Settings
from tyxe.samplers.potential import Point, minimal_norm

pytestmark = pytest.mark.usefixtures("double")


def mean_and_error(by_chain):
    return float(by_chain.mean()), float(by_chain.std()) / math.sqrt(len(by_chain))


@pytest.mark.parametrize("wanted", [5e-4, 5e-2])
def test_the_warm_up_reaches_the_wanted_energy_variance_and_samples_have_it(wanted):
    kernel = MCLMC(energy_variance=wanted, step_size=0.1)
    potential, start = scaled_gaussian(torch.ones(100)), torch.randn(64, 100)
    run = Run(kernel, potential, start, num_samples=300, num_warmup=1000, seed=1)
    errors = torch.stack([transition.statistics[:, 0].square() for transition in run.steps()])
    ratio, error = mean_and_error(errors[900:1000].mean(0) / wanted)
    assert abs(ratio - 1) < 4 * error
    assert error < 0.1
    if wanted == 5e-2:  # tuned by larger errors, which are not those of a Normal
        return
    ratio, error = mean_and_error(errors[-300:].mean(0) / wanted)
    # A step size that is fixed scatters by a thirtieth, and its sixth power by a fifth.
    assert abs(ratio - 1) < 4 * error + 15 * (1 / 30) ** 2
    assert error < 0.1


def test_a_step_is_two_half_refreshments_around_a_step_of_the_integrator():
    chains, d = 6, 5
    potential = scaled_gaussian(torch.rand(d) + 0.5)
    point, noise = Point.at(potential, torch.randn(chains, d)), torch.randn(2, chains, d)
    u = torch.nn.functional.normalize(torch.randn(chains, d))
    step, length = torch.rand(chains), 1 + torch.rand(chains)
    state, transition = MCLMC().step(
        potential, MCLMCState(point, u), Settings(step, length), Randomness(noise, torch.empty(0))
    )

    def forgotten(u, z):
        nu = ((step / length).exp() - 1).div(d).sqrt()[:, None]
        return torch.nn.functional.normalize(u + nu * z)

    after, turned, error = minimal_norm(potential, point, forgotten(u, noise[0]), step[:, None])
    torch.testing.assert_close(state, MCLMCState(after, forgotten(turned, noise[1])))
    torch.testing.assert_close(transition.statistics[:, 0], error / math.sqrt(d))
    assert (transition.statistics[:, 1] == 0).all()
    assert transition.done.all()
    torch.testing.assert_close(transition.position, after.position)


def test_the_tuning_is_that_of_the_formulas():
    """Step by step against sums in plain numbers, with some steps undone."""
    chains, d, steps, wanted, m = 3, 2, 40, (0.5, 0.1), 30.0
    kernel = MCLMC(step_size=0.2, energy_variance=wanted, memory=m)
    potential = scaled_gaussian(torch.ones(d))
    random = kernel.randomness(torch.randn(chains, d))
    state, settings, _ = found = kernel.start(potential, random.noise[0], random)
    rows = kernel.plan(Length(steps))
    sizes, errors, places, undone = [settings.step_size], [], [], []
    for row in rows:
        error, finite = 3 * torch.randn(chains), torch.rand(chains) < 0.8
        position = torch.randn(chains, d)
        told = torch.stack([torch.where(finite, error, 0), (~finite).double()], -1)
        transition = Transition(torch.ones(chains).bool(), position, error, told)
        warm = torch.ones(chains, dtype=torch.bool)
        found = kernel.adapt(found, state, transition, warm, row.expand(chains, -1), random)
        sizes.append(found.settings.step_size)
        errors.append(error)
        places.append(position)
        undone.append(~finite)

    for chain in range(chains):
        top = bottom = 0.0
        cap, eps = math.inf, 0.2
        last = []
        for i in range(steps):
            v = wanted[0] + (wanted[1] - wanted[0]) * min(1, i / (0.9 * steps))
            if undone[i][chain]:
                cap = 0.8 * eps
            else:
                xi = float(errors[i][chain]) ** 2 / v + 1e-8
                w = math.exp(-0.5 * (math.log(xi) / (6 * 1.5)) ** 2)
                top = (m - 1) / (m + 1) * top + w * xi / eps**6
                bottom = (m - 1) / (m + 1) * bottom + w
                if i >= 0.9 * steps:
                    last.append((eps, places[i][chain]))
            eps = min(cap, (top / bottom) ** (-1 / 6) if bottom else eps)
            assert float(sizes[i + 1][chain]) == pytest.approx(eps, rel=1e-9)
        weights, where = torch.tensor([e for e, _ in last]), torch.stack([x for _, x in last])
        mean = (weights[:, None] * where).sum(0) / weights.sum()
        variance = (weights[:, None] * (where - mean).square()).sum(0) / weights.sum()
        expected = float(variance.sum().sqrt())
        assert float(found.settings.length[chain]) == pytest.approx(expected, rel=1e-9)


def test_chains_that_are_not_warm_keep_their_settings():
    kernel, chains, d = MCLMC(), 4, 3
    potential = scaled_gaussian(torch.ones(d))
    random = kernel.randomness(torch.randn(chains, d))
    before = kernel.start(potential, random.noise[0], random)
    state, transition = kernel.step(potential, before.state, before.settings, random)
    warm = torch.tensor([True, False, True, False])
    rows = kernel.plan(Length(1)).expand(chains, -1)
    after = kernel.adapt(before, state, transition, warm, rows, random)
    assert ((after.settings.step_size != before.settings.step_size) == warm).all()
    assert ((after.adaptation.weight != 0) == warm).all()
    torch.testing.assert_close(after.state, state)


def walled(position):
    """Return a Normal's potential that is NaN beyond a wall, with its gradient."""
    value, gradient = scaled_gaussian(torch.ones(position.shape[-1]))(position)
    beyond = position[:, 0] > 0.5
    return torch.where(beyond, torch.nan, value), torch.where(beyond[:, None], torch.nan, gradient)


def test_steps_beyond_a_wall_are_undone_and_lower_the_step_size():
    start = 0.1 * torch.randn(16, 4)
    kernel = MCLMC(step_size=1.0, energy_variance=0.05)
    run, undone, sizes, places = Run(kernel, walled, start, 100, 400), [], [], [start]
    for transition in run.steps():
        undone.append(transition.statistics[:, 1] == 1)
        places.append(transition.position)
        sizes.append(run.settings.step_size)
    undone, sizes, places = torch.stack(undone), torch.stack(sizes), torch.stack(places)
    assert undone[:400].any(0).all()
    assert places.isfinite().all()
    assert float(places[..., 0].max()) <= 0.5
    moved = (places[1:] != places[:-1]).any(-1)
    assert torch.equal(moved, ~undone)
    # In the warm-up every such step caps all later step sizes at 0.8 of its own.
    for step, chain in undone[1:400].nonzero().tolist():
        assert float(sizes[step + 1 :, chain].max()) <= 0.8 * float(sizes[step, chain]) + 1e-12
    assert torch.equal(sizes[400:], sizes[399].expand(101, -1)[:100])
    (advice,) = kernel.advice({"energy_error": torch.zeros(1), "undone": undone.double()})
    assert "steps were not finite and were undone: lower energy_variance" in advice


def test_an_undone_step_turns_back():
    """Or the chain would run at the wall again and again, with the step that it has."""
    point, noise = Point.at(walled, torch.tensor([[0.4, 0.0]])), torch.randn(2, 1, 2)
    ahead, infinite = torch.tensor([[1.0, 0.0]]), torch.tensor([1e12])
    settings, state = Settings(torch.tensor([0.5]), infinite), MCLMCState(point, ahead)
    state, transition = MCLMC().step(walled, state, settings, Randomness(noise, torch.empty(0)))
    assert transition.statistics.tolist() == [[0.0, 1.0]]
    assert torch.equal(state.point.position, point.position)
    torch.testing.assert_close(state.velocity, -ahead, rtol=0, atol=1e-5)


def test_chains_before_a_wall_have_the_law_of_the_truncated_normal():
    kernel = MCLMC(step_size=0.3, momentum_length=1.5)
    draws = torch.randn(4000, 3)
    start = draws[draws[:, 0] < 0.5]
    run = Run(kernel, walled, start, 40)
    list(run.steps())
    assert 0.01 < float(run.kept.statistics[..., 1].mean()) < 0.5
    moved = run.kept.positions[:, -1]
    below = torch.special.ndtr(torch.tensor(0.5))
    uniform = torch.special.ndtr(moved)
    uniform[:, 0] /= below
    assert cells_p_value(uniform) > 1e-3


def test_a_momentum_length_that_is_given_is_kept():
    potential, start = scaled_gaussian(torch.ones(3)), torch.randn(5, 3)
    kept = Run(MCLMC(momentum_length=2.5), potential, start, 1, 100)
    found = Run(MCLMC(), potential, start, 1, 100)
    for run in (kept, found):
        list(run.steps())
    assert (kept.settings.length == 2.5).all()
    # Those of the chains, from fifteen at first.
    assert (found.settings.length < 15).all()
    assert len(found.settings.length.unique()) == 5
    assert (kept.settings.step_size != MCLMC().step_size).all()


def test_single_precision_holds_the_sums_of_the_tuning():
    """A start with an energy error of 1e20, whose square and sixth root leave single precision."""

    def steep(position):
        return 1e25 * position.square().sum(-1), 2e25 * position

    start = torch.ones(4, 5, dtype=torch.float32)
    run = Run(MCLMC(step_size=1e-2), steep, start, 1, 300)
    list(run.steps())
    assert run.settings.step_size.dtype == torch.float32
    assert run.settings.step_size.isfinite().all()
    assert (run.settings.step_size > 0).all()
    # It went down, by many powers of ten.
    assert (run.settings.step_size < 1e-6).all()


def test_one_dimension_is_refused():
    run = Run(MCLMC(), scaled_gaussian(torch.ones(1)), torch.zeros(2, 1), 1)
    with pytest.raises(ValueError, match="expected 2 or more, in which MCLMC moves"):
        next(run.steps())


def test_advice_on_energy_that_drifts():
    kernel = MCLMC(energy_variance=(0.5, 0.1))
    error = torch.randn(2, 10_000)
    fine = {"energy_error": 0.5 * error, "undone": torch.zeros(2, 10_000)}
    assert kernel.advice(fine) == []
    # A thousandth of outliers, as at kinks of a net, says nothing of the others.
    assert kernel.advice(fine | {"energy_error": 0.5 * error * (1 + 1e3 * (error > 3.1))}) == []
    (advice,) = kernel.advice(fine | {"energy_error": error})
    found = re.search(r"the energy's error is (\S+) a dimension, where 0.1 was wanted", advice)
    assert float(found[1]) == pytest.approx(1, abs=0.05)
