"""What it takes to go on with a training run exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """An optimiser's state, the number of epochs done, and the random generator's state.

    Attributes:
        optimizer: its `state_dict`, or None before the first fit.
        epoch: epochs done.
        rng: the CPU generator's state.
    """

    optimizer: dict[str, Any] | None
    epoch: int
    rng: Tensor

    @classmethod
    def of(cls, optimizer: Optimizer | None, epoch: int) -> Checkpoint:
        """Take the state of a fit after an epoch."""
        state = None if optimizer is None else optimizer.state_dict()
        return cls(state, epoch, torch.get_rng_state())

    def as_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain containers and tensors only."""
        return {
            "bnn": dict(state_dict),
            "optimizer": self.optimizer,
            "epoch": self.epoch,
            "rng": self.rng,
        }

    @classmethod
    def from_dict(cls, checkpoint: Mapping[str, Any]) -> Checkpoint:
        """Read what `as_dict` wrote."""
        return cls(checkpoint["optimizer"], checkpoint["epoch"], checkpoint["rng"].cpu())

    def restore(self, optimizer: Optimizer) -> int:
        """Give a fresh optimiser this state, and return the number of epochs done.

        Raises:
            ValueError: the optimiser is of another kind.
        """
        if self.optimizer is not None:
            optimizer.load_state_dict(self.optimizer)
        torch.set_rng_state(self.rng)
        return self.epoch
