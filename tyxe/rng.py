"""The states of the global random generators of PyTorch, NumPy and Python."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["random_state", "set_random_state", "set_torch_rng", "torch_rng"]


def torch_rng() -> list[Tensor]:
    """Return the state of the CPU's generator, then of each CUDA device's where CUDA is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def set_torch_rng(states: Sequence[Tensor]) -> None:
    """Set PyTorch's generators to what `torch_rng` returned; the tensors may be on any device."""
    cpu, *cuda = states
    torch.set_rng_state(cpu.cpu())
    if cuda:
        torch.cuda.set_rng_state_all([state.cpu() for state in cuda])


def random_state() -> dict[str, Any]:
    """Return the states of all global generators, as tensors and plain containers.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(()), np.random.rand(), random.random()
        >>> set_random_state(state)
        >>> first == (torch.rand(()), np.random.rand(), random.random())
        True
    """
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
