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

    More is better, ties are no improvement, and a member that has waited for `patience` epochs has
    stopped for good. It goes back to its best epoch, or without `restore_best` to that in which it
    stopped, where it had the parameters `best` and the `scores`. `epochs` are how many it had.
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
        self.epochs: Any = 0
        self._waited: Tensor | None = None

    def ends(self) -> bool:
        """Look at an epoch that has ended, and return whether all members have stopped."""
        now = self._score().detach()
        if self.scores is None or self._waited is None:
            self.scores, self._waited = torch.full_like(now, -torch.inf), torch.zeros_like(now)
        goes_on = self._waited < (torch.inf if self._patience is None else self._patience)
        self.epochs = self.epochs + goes_on
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
    """Train parameters `(members, ...)`, and yield after each epoch until all have stopped.

    The optimiser treats every number by itself, and a gradient is clipped by its member's norm.
    `refuse` is called before a step with the members whose loss or gradient is not finite, and the
    batch, and raises; without it such members go on.
    """
    for batches in epochs:
        for batch in batches:
            losses = gradients(batch)
            if refuse is not None or clip_norm is not None:
                norms = _norms(parameters)
                if refuse is not None:
                    bad = (~(losses + norms).isfinite()).nonzero().flatten().tolist()
                    if bad:
                        refuse(bad, batch)
                if clip_norm is not None:
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
