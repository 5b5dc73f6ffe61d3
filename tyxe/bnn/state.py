"""What it takes to go on with a training run exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Checkpoint", "set_torch_rng", "torch_rng"]


@dataclass(frozen=True)
class Checkpoint:
    """An optimiser's state, the number of epochs done, and the random generator's state.

    Attributes:
        optimizer: its `state_dict`, or None before the first fit.
        epoch: epochs done.
        rng: the state of the CPU's generator, then of each CUDA device's that is in use.
        kind: the optimiser's class by name.
        scheduler: `state_dict` of a Pyro scheduler's torch scheduler, or None.
    """

    optimizer: dict[str, Any] | None
    epoch: int
    rng: list[Tensor]
    kind: str
    scheduler: dict[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer | None, epoch: int, scheduler: Any = None) -> Checkpoint:
        """Take the state of a fit after an epoch."""
        return cls(
            None if optimizer is None else optimizer.state_dict(),
            epoch,
            torch_rng(),
            type(optimizer).__name__,
            None if scheduler is None else scheduler.state_dict(),
        )

    def as_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain containers and tensors only."""
        return {
            "bnn": dict(state_dict),
            "optimizer": self.optimizer,
            "epoch": self.epoch,
            "rng": self.rng,
            "kind": self.kind,
            "scheduler": self.scheduler,
        }

    @classmethod
    def from_dict(cls, checkpoint: Mapping[str, Any]) -> Checkpoint:
        """Read what `as_dict` wrote.

        Raises:
            RuntimeError: something else wrote it.
        """
        missing = {"bnn", *(field.name for field in fields(cls))} - set(checkpoint)
        if missing:
            raise RuntimeError(
                f"this is no checkpoint: it has no {', '.join(sorted(missing))}; pass what "
                "bnn.checkpoint() returned, or a plain state dict to load_state_dict"
            )
        return cls(**{field.name: checkpoint[field.name] for field in fields(cls)})

    def restore(self, optimizer: Optimizer, scheduler: Any = None) -> int:
        """Give a fresh optimiser this state, and return the number of epochs done.

        Raises:
            ValueError: the optimiser is of another kind.
        """
        if self.optimizer is not None:
            groups = [len(group["params"]) for group in optimizer.param_groups]
            saved = [len(group["params"]) for group in self.optimizer["param_groups"]]
            if (type(optimizer).__name__, groups) != (self.kind, saved):
                raise ValueError(
                    f"the checkpoint is of the optimiser {self.kind} with groups of {saved} "
                    f"parameters, but this fit has {type(optimizer).__name__} with {groups}; go on "
                    "with an optimiser built as the first was"
                )
            # An optimiser steps the tensors that it is given in place.
            optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        if self.scheduler is not None and scheduler is not None:
            scheduler.load_state_dict(self.scheduler)
        set_torch_rng(self.rng)
        return self.epoch


def torch_rng() -> list[Tensor]:
    """Return the state of the CPU's generator, then of each CUDA device's that is in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def set_torch_rng(states: Sequence[Tensor]) -> None:
    """Set the generators to what `torch_rng` returned, wherever it was loaded to."""
    cpu, *cuda = states
    torch.set_rng_state(cpu.cpu())
    if cuda:
        torch.cuda.set_rng_state_all([state.cpu() for state in cuda])
