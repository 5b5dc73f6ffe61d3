"""Runs: what is kept of which transition, and equal samples however a run stops and goes on."""

import pytest
import torch

from tyxe.samplers import HMC, MCLMC, NUTS, Run, batched

pytestmark = pytest.mark.usefixtures("double")

CHAINS, D = 4, 3
KERNELS = {
    "HMC": HMC(step_size=0.3, num_steps=3),
    "NUTS": NUTS(step_size=0.3, max_tree_depth=3),
    "MCLMC": MCLMC(step_size=0.3),
}
EACH = pytest.mark.parametrize("name", KERNELS)


def energy(w):
    return 0.5 * w.square().sum() + torch.sin(w[0] * w[1])


POTENTIAL = batched(energy, torch.zeros(1, D, dtype=torch.double))
STARTS = torch.linspace(-1, 1, CHAINS * D, dtype=torch.double).reshape(CHAINS, D)


def run_of(name, num_samples=6, num_warmup=0, potential=POTENTIAL, starts=STARTS, **options):
    return Run(KERNELS[name], potential, starts, num_samples, num_warmup, **options)


def finished(run):
    list(run.steps())
    return run


def is_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.kept, b.kept, strict=True))


@EACH
def test_what_is_kept_is_what_transitions_bring(name):
    """Against a list of all that the steps have brought, for each chain by itself."""
    num_samples, warmup, thinning = 5, 7, 3
    run = run_of(name, num_samples, warmup, thinning=thinning)
    assert (run.num_kept, run.settings) == (0, None)
    transition = [[] for _ in range(CHAINS)]
    for one in run.steps():
        for chain in one.done.nonzero()[:, 0].tolist():
            transition[chain].append([entry[chain] for entry in one[1:]])
        made = int(run.transitions.min())
        assert run.num_kept == min(max(made - warmup, 0) // thinning, num_samples)
    for chain, transitions in enumerate(transition):
        assert len(transitions) >= run.num_transitions == warmup + num_samples * thinning
        kept = transitions[warmup + thinning - 1 : run.num_transitions : thinning]
        for at, expected in enumerate(kept):
            found = [entry[chain, at] for entry in run.kept]
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    potentials = POTENTIAL(run.kept.positions.flatten(0, 1))[0]
    torch.testing.assert_close(run.kept.potentials.flatten(), potentials)
    # One that is at its end makes no more steps.
    assert list(run.steps()) == []


class Flaky:
    """A function that is interrupted at some of its calls."""

    def __init__(self, function, fails):
        self.function, self.fails, self.calls, self.stops = function, fails, 0, 0

    def __call__(self, *given):
        self.calls += 1
        if self.fails(self.calls):
            self.stops += 1
            raise KeyboardInterrupt
        return self.function(*given)


def gone_on_with(run):
    while run.num_kept < run.num_samples:
        try:
            list(run.steps())
        except KeyboardInterrupt:
            continue
    return run


@EACH
def test_a_run_that_is_stopped_in_mid_step_goes_on_exactly(name, monkeypatch):
    """By the potential, in the start, in the warm-up and after it; and in the adaptation."""
    whole = finished(run_of(name, 6, 50))
    # The start, which takes several evaluations, gets through at the second attempt.
    potential = Flaky(POTENTIAL, lambda call: call == 2 or (call > 30 and call % 7 == 1))
    stopped = gone_on_with(run_of(name, 6, 50, potential=potential))
    kind = type(whole.kernel)
    adapt = Flaky(kind.adapt, lambda call: call % 5 == 0)
    monkeypatch.setattr(kind, "adapt", lambda *given: adapt(*given))
    for run, flaky in ((stopped, potential), (gone_on_with(run_of(name, 6, 50)), adapt)):
        assert flaky.stops > 3
        assert is_equal(whole, run)
        assert torch.equal(whole.settings.step_size, run.settings.step_size)


@EACH
def test_seeds_are_runs(name):
    """The numbers of the rest of the program are neither used nor taken."""
    before = torch.get_rng_state()
    one, other = (finished(run_of(name, 3, 5, seed=seed)) for seed in (1, 2))
    assert not torch.equal(one.kept.positions, other.kept.positions)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert is_equal(one, finished(run_of(name, 3, 5, seed=1)))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_has_the_dtype_of_its_starts(name, dtype):
    run = finished(run_of(name, 5, 25, starts=STARTS.to(dtype)))
    assert all(kept.dtype == dtype for kept in run.kept)
    assert all(one.dtype == dtype for one in run.settings)
    assert run.kept.positions.isfinite().all()
    plain = finished(run_of(name, 5, starts=STARTS.to(dtype)))
    assert (plain.kept.positions[:, -1] != STARTS.to(dtype)).any()


@EACH
def test_samples_go_where_they_are_told_to(name, tmp_path):
    plain = finished(run_of(name, 4, 3)).kept.positions
    half = torch.full((CHAINS, 4, D), torch.nan, dtype=torch.float16)
    path = str(tmp_path / "samples")
    on_disk = torch.from_file(path, True, plain.numel(), dtype=torch.double).view(plain.shape)
    for positions in (half, on_disk):
        run = finished(run_of(name, 4, 3, positions=positions))
        assert run.kept.positions is positions
        assert torch.equal(positions, plain.to(positions.dtype))
    again = torch.from_file(path, False, plain.numel(), dtype=torch.double).view(plain.shape)
    assert torch.equal(again, plain)


@EACH
def test_every_step_is_inside_the_context(name):
    log = []

    class Inside:
        def __enter__(self):
            log.append("in")

        def __exit__(self, *error):
            log.append("out")

    def watched(position):
        assert log[-1] == "in"
        assert not torch.is_grad_enabled()
        return POTENTIAL(position)

    run = run_of(name, 2, 3, potential=watched, inside=Inside)
    for _ in run.steps():
        # Out of it between steps.
        assert log[-1] == "out"
        assert torch.is_grad_enabled()
    assert log[::2] == ["in"] * (len(log) // 2)
    assert log[1::2] == ["out"] * (len(log) // 2)


@pytest.mark.parametrize("name", ["NUTS", "MCLMC"])
def test_compiled_is_eager(name):
    """The same numbers are consumed: what differs is rounding, which short runs hardly multiply."""
    # Starts of other strides than a program's own.
    starts = STARTS.T.contiguous().T
    # Not longer: 1e-15 at the start is 1e-8 after twenty transitions, and 1e-4 after fifty.
    eager = finished(run_of(name, 6, 12, starts=starts))
    compiled = finished(run_of(name, 6, 12, starts=starts, compile=True))
    for found, expected in zip(compiled.kept, eager.kept, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(compiled.settings, eager.settings, rtol=1e-7, atol=1e-7)
    if name == "NUTS":
        assert_window_ends_as_eager(KERNELS[name], compiled.programs[1])


def assert_window_ends_as_eager(kernel, program):
    random = kernel.randomness(STARTS, torch.Generator().manual_seed(0))
    chains = kernel.start(POTENTIAL, STARTS, random)
    rows = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    rows, warm = rows[[0, 1, 2, 1]], torch.tensor([True, True, True, False])
    for _ in range(3):
        state, transition = kernel.step(POTENTIAL, chains.state, chains.settings, random)
        chains = kernel.adapt(chains, state, transition, warm, rows[:1].expand(4, -1), random)
    given = chains, state, transition, warm, rows, random
    expected = kernel.adapt(*given)
    torch.testing.assert_close(program(*given), expected, rtol=1e-12, atol=1e-12)
    changed = (expected.settings.inverse_mass != 1).any(-1)
    assert changed.tolist() == [False, True, False, False]


def test_a_potential_with_state_is_not_compiled():
    calls = []

    def counting(position):
        calls.append(1)
        value, gradient = POTENTIAL(position)
        return value * len(calls), gradient

    run = run_of("HMC", 2, potential=counting, compile=True)
    with pytest.raises(RuntimeError, match="cannot be compiled: its forward depends on more"):
        next(run.steps())


def test_chains_are_those_of_the_same_numbers_whatever_their_neighbours():
    """A chain that diverges changes nothing in the others."""
    wild = STARTS.clone()
    wild[0] = 1e6
    for name in KERNELS:
        with_wild, plain = (finished(run_of(name, 4, starts=s)) for s in (wild, STARTS))
        assert torch.equal(with_wild.kept.positions[1:], plain.kept.positions[1:])
