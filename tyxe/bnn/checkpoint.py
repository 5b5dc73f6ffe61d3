"""Checkpoints from which a fit continues exactly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tyxe.rng import set_torch_rng, torch_rng

__all__ = ["Checkpoint"]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a fit after some epochs.

    `optimizer` and `scheduler` are state dicts, or None where there is none, `kind` is the name of
    the optimiser's class, and `rng` has the states of PyTorch's generators.
    """

    optimizer: dict[str, Any] | None
    epoch: int
    rng: list[Tensor]
    kind: str
    scheduler: dict[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer | None, epoch: int, scheduler: Any = None) -> Checkpoint:
        """Return the checkpoint of a fit after an epoch."""
        return cls(
            None if optimizer is None else optimizer.state_dict(),
            epoch,
            torch_rng(),
            type(optimizer).__name__,
            None if scheduler is None else scheduler.state_dict(),
        )

    def as_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with a BNN's state dict, as plain containers and tensors."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"bnn": dict(state_dict), **own}

    @classmethod
    def from_dict(cls, checkpoint: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint of a dictionary from `as_dict`, or raise a RuntimeError."""
        missing = {"bnn", *(field.name for field in fields(cls))} - set(checkpoint)
        if missing:
            raise RuntimeError(
                f"this is no checkpoint: it has no {', '.join(sorted(missing))}; pass what "
                "bnn.checkpoint() returned, or a plain state dict to load_state_dict"
            )
        return cls(**{field.name: checkpoint[field.name] for field in fields(cls)})

    def restore(self, optimizer: Optimizer, scheduler: Any = None) -> int:
        """Restore optimiser, scheduler and generators, and return the number of epochs done.

        An optimiser of another class, or with other groups, is a ValueError.
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
            # A copy, because the optimiser changes the tensors of its state in place.
            optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        if self.scheduler is not None and scheduler is not None:
            scheduler.load_state_dict(self.scheduler)
        set_torch_rng(self.rng)
        return self.epoch
