"""States of the random generators: put back, saved and loaded, and of PyTorch alone."""

import io
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.soak.pretend import DEVICE, pretend
from tyxe.rng import (
    random_state,
    seeded,
    set_random_state,
    set_torch_rng,
    torch_rng,
    torch_rng_kept,
)


def numbers():
    # An odd number of normals: NumPy and Python keep the second of a pair for the next call.
    drawn = [torch.rand(()).item(), torch.randn(()).item(), np.random.rand()]
    return [*drawn, np.random.standard_normal(), random.random(), random.gauss(0, 1)]


def test_numbers_are_the_same_after_a_state_is_put_back():
    numbers()
    state = random_state()
    expected = [numbers(), numbers()]
    set_random_state(state)
    assert [numbers(), numbers()] == expected


def test_a_state_is_loaded_with_weights_only():
    numbers()
    torch.save(random_state(), file := io.BytesIO())
    expected = numbers()
    file.seek(0)
    set_random_state(torch.load(file, weights_only=True))
    assert numbers() == expected


def test_a_state_is_a_copy_that_draws_do_not_change():
    state = random_state()
    first = numbers()
    assert numbers() != first
    set_random_state(state)
    assert numbers() == first


def test_a_state_of_pytorch_alone_leaves_the_other_generators():
    state, rest = {"rng": torch_rng()}, (np.random.get_state()[1].copy(), random.getstate())
    expected = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(np.random.get_state()[1], rest[0])
    assert random.getstate() == rest[1]
    set_torch_rng(state["rng"])
    assert torch.equal(torch.rand(3), expected)


def test_an_accelerators_generator_is_saved_and_put_back():
    with pretend():
        torch.rand(3, device=DEVICE)
        state, host = torch_rng(), torch.rand(3)
        expected = torch.rand(3, device=DEVICE).cpu()
        torch.rand(3, device=DEVICE)
        set_torch_rng(state)
        assert torch.equal(torch.rand(3, device=DEVICE).cpu(), expected)
        assert torch.equal(torch.rand(3), host)
        with torch_rng_kept():
            following = torch.rand(3, device=DEVICE).cpu()
        assert torch.equal(torch.rand(3, device=DEVICE).cpu(), following)


def test_a_state_of_an_accelerator_is_no_use_to_the_cpu_alone(monkeypatch):
    with pretend():
        state = torch_rng()
    expected = torch.rand(3)
    assert len(state) == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    set_torch_rng(state)
    assert torch.equal(torch.rand(3), expected)
    assert len(torch_rng()) == 1


def test_a_device_that_is_not_in_use_is_not_started(monkeypatch):
    with pretend():
        monkeypatch.setattr(torch.pretend, "is_initialized", lambda: False)
        assert len(torch_rng()) == 1


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
    states = torch_rng()
    assert [len(states), *states[1:]] == [3, *module.states]
    set_torch_rng([states[0], states[2], states[1]])
    assert module.states == [states[2], states[1]]


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_seed_holds_for_a_while(device):
    with pretend():
        torch.manual_seed(0)
        before = torch_rng()
        drawn = []
        for _ in range(2):
            with seeded(3, torch.device(device)):
                drawn.append(torch.rand(4, device=device).cpu())
        assert torch.equal(*drawn)
        assert all(map(torch.equal, before, torch_rng()))


def forked(count: int) -> list[float]:
    """Return a random number of each of so many forked processes."""
    found = []
    for _ in range(count):
        end, start = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(start, torch.rand(()).numpy().tobytes())
            os._exit(0)
        os.waitpid(child, 0)
        found.append(np.frombuffer(os.read(end, 4), np.float32).item())
        os.close(end)
        os.close(start)
    return found


@pytest.mark.forks
def test_forked_processes_draw_numbers_of_their_own():
    torch.manual_seed(0)
    mine = torch.rand(()).item()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = forked(4)
    assert len({mine, *found}) == 5
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.forks
def test_forked_processes_draw_the_same_in_each_run():
    code = (
        "import torch, tyxe; from tests.test_rng import forked; "
        "torch.manual_seed(0); print(*forked(2))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


@pytest.mark.forks
def test_workers_of_a_loader_have_the_seeds_of_pytorch():
    """They are the loader's base seed and the worker's number."""

    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return torch.initial_seed()

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Drawn(), num_workers=2, multiprocessing_context="fork")
    found = torch.cat(list(loader))
    assert found[1] - found[0] == 1
