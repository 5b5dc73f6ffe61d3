"""The states of the global random generators of PyTorch, NumPy and Python."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tyxe.threads import exclusive

# --------------------------------------------------------------------------- PyTorch


def _generators(device: torch.device) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the module that has the generators of a kind of device, and what it calls each."""
    if device.type == "cpu":
        return torch, [()]
    module = torch.get_device_module(device)
    count = module.device_count()
    # Of a device that is the only one of its kind, older versions of PyTorch take no index.
    return module, [()] if count == 1 else [(index,) for index in range(count)]


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def torch_rng() -> list[Tensor]:
    """Return the state of the CPU's generator, then of each accelerator's that is in use."""
    found, accelerator = [torch.get_rng_state()], _accelerator()
    if accelerator is not None:
        module, places = _generators(accelerator)
        # To ask for its state would start a device that is not.
        if getattr(module, "is_initialized", module.is_available)():
            found += [module.get_rng_state(*place) for place in places]
    return found


def set_torch_rng(states: Sequence[Tensor]) -> None:
    """Set PyTorch's generators to what `torch_rng` returned; the tensors may be on any device.

    States of accelerators that are not there are left out.
    """
    cpu, *others = states
    torch.set_rng_state(cpu.cpu())
    accelerator = _accelerator()
    if others and accelerator is not None:
        module, places = _generators(accelerator)
        for place, state in zip(places, others, strict=False):
            module.set_rng_state(state.cpu(), *place)


@contextmanager
def torch_rng_kept() -> Iterator[None]:
    """Set PyTorch's generators back at the end, and let no other thread draw from them before."""
    with exclusive():
        before = torch_rng()
        try:
            yield
        finally:
            set_torch_rng(before)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let a device's random numbers start from a seed, and set its generator back at the end.

    No other thread draws from it before.

    Example:
        >>> with seeded(1, torch.device("cpu")):
        ...     first = torch.rand(())
        >>> with seeded(1, torch.device("cpu")):
        ...     bool(torch.rand(()) == first)
        True
    """
    module, places = _generators(device)
    place = places[device.index or 0]
    with exclusive():
        before = module.get_rng_state(*place)
        module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), *place)
        try:
            yield
        finally:
            module.set_rng_state(before, *place)


# --------------------------------------------------------------------------- forked processes


class _Forks:
    """Gives forked processes random numbers that differ from each other's and from the parent's.

    They depend on the parent's generator and on how often it has forked, so that they are the same
    in each run of a program that sets its seed. NumPy's and Python's generators are left alone.
    """

    def __init__(self) -> None:
        self.count = 0
        self._state = b""

    def before(self) -> None:
        """Count a fork, in the parent, and take the generator's state.

        That waits for a thread that is drawing, whose hold on the generator the child would keep.
        """
        self.count += 1
        self._state = torch.default_generator.get_state().numpy().tobytes()

    def in_child(self) -> None:
        """Seed the child's generator of the CPU; accelerators do not work in it."""
        mixed = hashlib.blake2b(
            self._state + self.count.to_bytes(8, "little"), digest_size=8
        ).digest()
        torch.default_generator.manual_seed(int.from_bytes(mixed, "little"))


_FORKS = _Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FORKS.before, after_in_child=_FORKS.in_child)


# --------------------------------------------------------------------------- all of them


def random_state() -> dict[str, Any]:
    """Return the states of all global generators, as tensors and plain containers."""
    state = np.random.get_state(legacy=False)
    # As lists, because `torch.load(weights_only=True)` refuses NumPy arrays.
    inner = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state["state"].items()}
    return {
        "rng": torch_rng(),
        "numpy": {**state, "state": inner},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to a `random_state`, or PyTorch's alone where it has no others."""
    set_torch_rng(state["rng"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
