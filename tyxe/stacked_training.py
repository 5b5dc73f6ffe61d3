"""One loop that trains several models of one structure, in tensors of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Sets gradients of stacked parameters for a batch of each member, and returns their losses.
Gradients = Callable[[Any], Tensor]


class EarlyStopping:
    """When members stop, by a score of held-out data, and the parameters that they had then.

    Ties count as no improvement, and a member that has waited long enough has stopped for good.

    Args:
        parameters: of all members, `(members, ...)`.
        score: returns the members' scores at their parameters, `(members,)`; more is better.
        patience: a member stops after so many epochs without a higher score; None for never.
        restore_best: whether members go back to their best epoch; else to that in which they stop.
            There they have the parameters `best`, and the `scores`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        score: Callable[[], Tensor],
        patience: int | None,
        restore_best: bool = True,
    ) -> None:
        self._parameters, self._score = parameters, score
        self._patience, self._restore_best = patience, restore_best
        self.best = {name: p.detach().clone() for name, p in parameters.items()}
        self.scores: Tensor | None = None
        self._waited: Tensor | None = None

    def ends(self) -> bool:
        """Look at an epoch that has ended, and return whether all members have stopped."""
        now = self._score().detach()
        if self.scores is None or self._waited is None:
            self.scores, self._waited = torch.full_like(now, -torch.inf), torch.zeros_like(now)
        goes_on = self._waited < (torch.inf if self._patience is None else self._patience)
        better = goes_on & (now > self.scores)
        kept = better if self._restore_best else goes_on
        for name, parameter in self._parameters.items():
            self.best[name][kept] = parameter.detach()[kept]
        self.scores = torch.where(better, now, self.scores)
        self._waited = torch.where(better, 0, self._waited + 1)
        return self._patience is not None and bool((self._waited >= self._patience).all())

    @torch.no_grad()
    def go_back(self) -> None:
        """Set the members to what they go back to; one whose scores were all NaN stays."""
        known = self.scores is not None and self.scores > -torch.inf
        for name, parameter in self._parameters.items():
            parameter[known] = self.best[name][known]


def train_stacked(
    gradients: Gradients,
    parameters: Mapping[str, Tensor],
    optimizer: Any,
    epochs: Iterable[Iterable[Any]],
    *,
    clip_norm: float | None = None,
    refuse: Callable[[list[int], Any], None] | None = None,
    stopping: EarlyStopping | None = None,
) -> Iterator[None]:
    """Yield after each epoch, until there is none left or all members have stopped.

    Args:
        gradients: sets the parameters' gradients for a batch, and returns losses, `(members,)`.
        parameters: of all members, `(members, ...)`.
        optimizer: over them, which treats every number by itself.
        epochs: for each epoch the batches.
        clip_norm: largest norm of a member's gradient, above which it is scaled down.
        refuse: called with the members whose loss or gradient is not finite, and the batch, before
            a step; it raises. By default such members go on.
        stopping: when members stop.
    """
    for batches in epochs:
        for batch in batches:
            losses = gradients(batch)
            norms = _norms(parameters) if refuse is not None or clip_norm is not None else None
            if refuse is not None and norms is not None:
                bad = ~(losses + norms).isfinite()
                if bool(bad.any()):
                    refuse(bad.nonzero().flatten().tolist(), batch)
            if clip_norm is not None and norms is not None:
                _scale(parameters, (clip_norm / (norms + 1e-6)).clamp(max=1))
            optimizer.step()
        ends = stopping is not None and stopping.ends()
        yield
        if ends:
            return


def _norms(parameters: Mapping[str, Tensor]) -> Tensor:
    found = [p.grad for p in parameters.values() if p.grad is not None]
    norms = [gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in found]
    return torch.stack(norms).norm(dim=0)


def _scale(parameters: Mapping[str, Tensor], factors: Tensor) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad *= factors.view(-1, *[1] * (parameter.dim() - 1))
