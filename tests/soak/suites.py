"""What the suites are, and how one is run: in a module that a new process finds by its name."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

import tyxe

# The module, the function, and the count of the full run.
SUITES = {
    "fuzz": ("fuzz", "run", 2000),
    "threads": ("threads", "run", 100),
    "kill": ("kill", "run", 200),
    "corruption": ("corruption", "run", 200),
    "modes": ("modes", "run", 1),
    "device": ("device", "run", 10_000),
    "weights": ("weights", "run", 2000),
}


def figures_of(name: str, count: int, seed: int) -> dict[str, Any]:
    """Run a suite, and return its figures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", tyxe.TyxeWarning)
    module, function, _ = SUITES[name]
    found: dict[str, Any] = getattr(importlib.import_module(f"tests.soak.{module}"), function)(
        count, seed
    )
    return found
