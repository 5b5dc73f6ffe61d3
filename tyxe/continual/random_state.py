"""The state of the global random generators: PyTorch's, NumPy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from tyxe.bnn.state import set_torch_rng, torch_rng

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """Return the state as tensors and plain containers.

    Example:
        >>> import torch
        >>> state = random_state()
        >>> first = torch.rand(()), np.random.rand(), random.random()
        >>> set_random_state(state)
        >>> first == (torch.rand(()), np.random.rand(), random.random())
        True
    """
    state = np.random.get_state(legacy=False)
    # Of an array, which is not safe to load.
    inner = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state["state"].items()}
    return {
        "rng": torch_rng(),
        "numpy": {**state, "state": inner},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators of which there is a state."""
    set_torch_rng(state["rng"])
    # Older states have PyTorch's alone.
    if "numpy" in state:
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
