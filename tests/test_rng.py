"""States of the random generators: put back, saved and loaded, and of PyTorch alone."""

import io
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tyxe


def numbers():
    # An odd number of normals: NumPy and Python keep the second of a pair for the next call.
    drawn = [torch.rand(()).item(), torch.randn(()).item(), np.random.rand()]
    return [*drawn, np.random.standard_normal(), random.random(), random.gauss(0, 1)]


def test_numbers_are_the_same_after_a_state_is_saved_loaded_and_put_back():
    numbers()
    torch.save(tyxe.rng.random_state(), file := io.BytesIO())
    expected = [numbers(), numbers()]
    file.seek(0)
    tyxe.rng.set_random_state(torch.load(file, weights_only=True))
    assert [numbers(), numbers()] == expected


def test_a_state_of_pytorch_alone_leaves_the_other_generators():
    state = {"rng": tyxe.rng.torch_rng()}
    rest = np.random.get_state()[1].copy(), random.getstate()
    expected = torch.rand(3)
    tyxe.rng.set_random_state(state)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(np.random.get_state()[1], rest[0])
    assert random.getstate() == rest[1]
    tyxe.rng.set_torch_rng(state["rng"])
    assert torch.equal(torch.rand(3), expected)


class Several:
    """A kind of device of which there are two, whose functions take an index."""

    def __init__(self) -> None:
        self.states = [torch.zeros(1), torch.ones(1)]

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


def test_each_of_several_devices_has_its_own_state(monkeypatch):
    module = Several()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    states = tyxe.rng.torch_rng()
    assert [len(states), *states[1:]] == [3, *module.states]
    tyxe.rng.set_torch_rng([states[0], states[2], states[1]])
    assert module.states == [states[2], states[1]]


def test_a_stream_has_numbers_of_its_own():
    before = tyxe.rng.torch_rng()
    drawn = []
    for _ in range(2):
        stream = tyxe.rng.RandomStream(seed=3)
        with stream:
            first = torch.rand(4)
        torch.rand(4)
        with stream:
            drawn.append(torch.cat([first, torch.randn(4)]))
        tyxe.rng.set_torch_rng(before)
    assert torch.equal(*drawn)
    assert all(map(torch.equal, before, tyxe.rng.torch_rng()))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.poisson, torch._standard_gamma])
def test_a_stream_inside_another_decides_the_numbers(draw):
    rates = torch.ones(4)
    drawn = []
    for outer in (1, 2):
        with tyxe.rng.RandomStream(outer), tyxe.rng.RandomStream(3):
            drawn.append(draw(rates))
    assert torch.equal(*drawn)


def test_a_stream_without_a_seed_starts_where_the_generators_are():
    torch.manual_seed(0)
    stream = tyxe.rng.RandomStream()
    expected = [torch.rand(3), torch.randperm(5), torch.bernoulli(torch.full((8,), 0.5))]
    with stream:
        found = [torch.rand(3), torch.randperm(5), torch.bernoulli(torch.full((8,), 0.5))]
    assert all(map(torch.equal, found, expected))


def test_items_are_made_with_the_numbers_of_a_stream_and_used_without():
    def items():
        for _ in range(3):
            yield torch.rand(())

    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(0)
    before = tyxe.rng.torch_rng()
    found = []
    for item in tyxe.rng.drawing_from(tyxe.rng.RandomStream(), items()):
        found.append(item.item())
        assert torch.equal(before[0], torch.get_rng_state())
    assert found == expected


BARE = re.compile(
    r"\btorch\.(manual_seed|seed|set_rng_state|random\.)|pyro\.set_rng_seed|enable_validation"
    r"|validation_enabled|set_default_validate_args|np\.random\.seed|\brandom\.seed"
)


def test_generators_and_validation_are_set_in_one_place_each() -> None:
    """Elsewhere they would be set without the lock, and other threads would draw again."""
    package = Path(tyxe.__file__).parent
    files = {p.relative_to(package).as_posix(): p.read_text() for p in package.rglob("*.py")}
    lines = {
        (name, line)
        for name, text in files.items()
        for line in text.splitlines()
        if BARE.search(line) and ">>>" not in line and not name.startswith("testing/")
    }
    assert {name for name, _ in lines} <= {"rng.py", "threads.py"}


def test_a_branch_of_a_stream_goes_on_from_it_and_leaves_the_process_alone() -> None:
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        with tyxe.rng.RandomStream(seed=3):
            expected = tyxe.rng.torch_rng()[0]
            branch = tyxe.rng.RandomStream.branch()
            with branch:
                assert torch.equal(tyxe.rng.torch_rng()[0], expected)
                found.append(torch.rand(3))
            assert not torch.equal(torch.rand(3), found[-1])
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_may_stand_in_for_the_generators():
    generator, before = torch.Generator().manual_seed(3), torch.get_rng_state()
    expected = [torch.rand(2, generator=generator) for _ in range(3)]
    stream = tyxe.rng.RandomStream(seed=3)
    for number in expected:
        with stream if number is expected[1] else stream.as_generators():
            assert torch.equal(torch.rand(2), number)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_of_a_stream_that_stands_in_leaves_the_generators_alone(monkeypatch) -> None:
    set_states, calls = tyxe.rng.set_torch_rng, []

    def interrupted(states) -> None:
        set_states(states)
        calls.append(states)
        if len(calls) == 1:
            raise KeyboardInterrupt

    before = torch.get_rng_state()
    monkeypatch.setattr(tyxe.rng, "set_torch_rng", interrupted)
    with pytest.raises(KeyboardInterrupt), tyxe.rng.RandomStream(seed=3).as_generators():
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_leaves_the_modes_around_it() -> None:
    class Counted(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counted() as counted, tyxe.rng.RandomStream(seed=3):
        with tyxe.rng.by_generators():
            before = counted.seen
            first = torch.rand(2)
            assert counted.seen > before
        second = torch.rand(2)
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(first, torch.rand(2, generator=generator))
    assert torch.equal(second, torch.rand(2, generator=generator))
