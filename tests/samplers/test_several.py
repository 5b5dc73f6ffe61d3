"""Several steps of one launch are the steps one by one, and wait for the device once."""

from functools import partial

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tyxe
from tests.oracles.recorded import Recorded
from tyxe import program
from tyxe.samplers import HMC, MCLMC, NUTS, Kernel, Run, run
from tyxe.samplers.run import several, steps_at_once

CHAINS, D, SCALES = 3, 2, torch.tensor([1.0, 0.5])
KERNELS = {"HMC": HMC(num_steps=3), "NUTS": NUTS(max_tree_depth=4), "MCLMC": MCLMC()}


def normal(position: Tensor) -> tuple[Tensor, Tensor]:
    scaled = position / SCALES.to(position)
    return 0.5 * scaled.square().sum(-1), scaled / SCALES.to(position)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch several steps as on a GPU, where traces stand for what a compiler makes of them."""
    for module in (run, program):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
    monkeypatch.setattr(program, "has_compiler", lambda device: False)
    monkeypatch.setattr(program, "Capture", Recorded)


def run_of(kernel: Kernel, num_samples: int = 9, num_warmup: int = 20, chains=CHAINS, **how) -> Run:
    starts = torch.randn(chains, D, generator=torch.Generator().manual_seed(0)).double()
    return Run(kernel, normal, starts, num_samples, num_warmup, compile=True, **how)


def finished(run: Run) -> Run:
    list(run.steps())
    return run


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("adapts", [True, False])
def test_steps_at_once_are_steps_one_by_one(name: str, adapts: bool) -> None:
    kernel, position = KERNELS[name], torch.randn(CHAINS, D)
    plan = kernel.plan(run.Length(7 if adapts else 0))
    chains = kernel.start(normal, position, kernel.randomness(position))
    counts, count = torch.zeros(CHAINS, dtype=torch.long), 40
    given = [kernel.randomness(position) for _ in range(count)]
    leaves, place = pytree.tree_flatten((chains, counts))
    step = partial(kernel.step, normal)
    numbers = map(torch.stack, zip(*given, strict=True))
    found = several(step, kernel.adapt if adapts else None, plan, place)(*leaves, *numbers)
    brought = []
    for random in given:
        state, transition = kernel.step(normal, chains.state, chains.settings, random)
        after = chains._replace(state=state)
        warm = transition.done & (counts < len(plan))
        if adapts and bool(warm.any()):
            rows = plan[counts.clamp(max=len(plan) - 1)]
            after = kernel.adapt(chains, state, transition, warm, rows, random)
        chains, counts = after, counts + transition.done
        brought.append(transition)
    assert counts.min() > 0
    stacked = map(torch.stack, zip(*brought, strict=True))
    expected = [*pytree.tree_leaves((chains, counts)), *stacked]
    torch.testing.assert_close(found, expected, equal_nan=True)


class Waits(TorchDispatchMode):
    """Counts what the host waits for."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KERNELS)
def test_a_launch_is_waited_for_twice(name: str, on_gpu) -> None:
    chains = run_of(KERNELS[name], num_samples=2000, num_warmup=0)
    steps = chains.steps()
    for _ in range(32):
        next(steps)
    with Waits() as waits:
        for _ in range(64):
            next(steps)
    assert waits.made == 4


@pytest.mark.parametrize("name", ["HMC", "MCLMC"])
def test_samples_of_launches_have_the_law_of_the_target(name: str, on_gpu) -> None:
    chains = run_of(KERNELS[name], num_samples=20, num_warmup=60, chains=300, seed=1)
    before = Recorded.made
    finished(chains)
    assert Recorded.made == before + 2  # with adaptation, and without
    assert chains.num_kept == 20
    found = chains.kept.positions
    assert not torch.equal(found[:, 1:], found[:, :-1])
    torch.testing.assert_close(normal(found.flatten(0, 1))[0], chains.kept.potentials.flatten())
    # Chains are independent, of which each tells at least as much as one sample.
    variance = found.square().mean(1) / SCALES.square()
    error = variance.std(0) / len(variance) ** 0.5
    assert ((variance.mean(0) - 1).abs() < 4 * error + 0.05).all()
    assert (found.mean((0, 1)).abs() < 4 * SCALES / len(variance) ** 0.5).all()


def test_steps_are_launched_together_on_request_only(on_gpu, monkeypatch) -> None:
    monkeypatch.setattr(run, "_WORTH_COMPILING", 5)
    monkeypatch.setattr(run, "has_compiler", lambda device: True)
    before, starts = Recorded.made, torch.randn(CHAINS, D)
    assert finished(Run(KERNELS["HMC"], normal, starts, 40)).is_compiled
    assert Recorded.made == before
    assert finished(run_of(KERNELS["HMC"], num_warmup=0)).is_compiled
    assert Recorded.made == before + 1


def test_an_interrupt_within_a_launch_is_repeated(on_gpu, monkeypatch) -> None:
    whole = finished(run_of(KERNELS["HMC"], seed=3))
    broken, kept, calls = run_of(KERNELS["HMC"], seed=3), Run._kept_of, []

    def stops(run: Run, transition) -> Tensor:
        calls.append(run.num_kept)
        found = kept(run, transition)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Run, "_kept_of", stops)

    with pytest.raises(KeyboardInterrupt):
        finished(broken)
    finished(broken)
    assert calls[2] == calls[3]
    for one, other in zip(broken.kept, whole.kept, strict=True):
        assert torch.equal(one, other)


def test_launches_of_large_positions_are_of_fewer_steps() -> None:
    for shape, count in (((4, 100), 32), ((256, 2**13), 2), ((4, 2**30), 1)):
        assert steps_at_once(torch.empty(shape, device="meta")) == count


class _Wrong(Recorded):
    def __call__(self):
        return [one + 1 for one in super().__call__()]


def _refuse(function: object, device: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("capture", "reason"), [(_refuse, "not permitted"), (_Wrong, "gives other numbers")]
)
def test_steps_that_no_graph_takes_go_on_one_by_one(
    capture: object, reason: str, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "Capture", capture)
    chains = run_of(KERNELS["HMC"])
    with pytest.warns(tyxe.TyxeWarning, match=f"one by one.*{reason}") as warned:
        finished(chains)
    assert len(warned) == 1
    assert chains.num_kept == 9
    scaled = normal(chains.kept.positions.flatten(0, 1))[0]
    torch.testing.assert_close(scaled, chains.kept.potentials.flatten())
