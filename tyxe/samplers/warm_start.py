"""Members of one structure trained in stacked tensors, for ensembles and as starts of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
from tyxe.samplers.potential import gradients

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


# The mean loss of some data points at a vector `(d,)`; the points are given by their numbers.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class WarmStart:
    """Start chains at the members of a deep ensemble, for `MCMC_BNN.fit(init=...)`.

    All members are trained at once in one tensor, on the likelihood alone, with different seeds and
    orders of the data. With `MCLMC` this is MILE.

    Args:
        optim: a torch optimiser class, or a `functools.partial` of one, that treats every number
            separately (as SGD, Adam and AdamW do).
        num_epochs: largest number of epochs.
        patience: a member stops after so many epochs without a lower validation loss.
        batch_size: number of data points in a step of a member.
        validation: the share of the data that is left out of training, for early stopping; with 0
            all epochs are made.

    Raises:
        TypeError, ValueError: `optim` is not a function or class; numbers out of range.

    Reference:
        Sommer et al. 2025, 3.2.
    """

    optim: Callable[..., Optimizer] = torch.optim.AdamW
    num_epochs: int = check.field(1000, check.count)
    patience: int = check.field(10, check.count)
    batch_size: int = check.field(32, check.count)
    validation: float = check.field(0.1, check.number, least=0, below=1)

    def __post_init__(self) -> None:
        check.fields(self)
        expected = "an optimiser class such as torch.optim.AdamW, or a functools.partial of one"
        check.function("optim", self.optim, f"{expected}: the starts are its parameters")

    def train(
        self, loss: Loss, members: Tensor, num_points: int, generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Yield after each epoch members `(chains, d)` as they were when their loss was least.

        That is the loss of the points kept for validation; without any, members are the latest.

        Args:
            loss: the mean loss of data points, by their numbers, at the vector of a member.
            members: where they start.
            num_points: number of data points.
            generator: on the members' device.

        Raises:
            TypeError: `optim` makes no such optimiser.
            ValueError: too few points to keep some for validation; a member whose validation loss
                is never finite.
        """
        order = torch.randperm(num_points, generator=generator, device=members.device)
        held_out = max(round(self.validation * num_points), 1) if self.validation else 0
        kept, rows = order[:held_out], order[held_out:]
        hint = f", since {held_out} of {num_points} are for validation: pass validation=0"
        check.count("the number of points to train", len(rows), hint=hint)
        every = gradients(loss, members, rows[:1].expand(len(members), 1))
        weights = members.clone().requires_grad_()
        expected = "one of torch.optim that takes a step by gradients, such as torch.optim.AdamW"
        optimizer = check.one_of("what optim makes", self.optim([weights]), Optimizer, expected)
        stopping = None
        if held_out:
            stopping = EarlyStopping(
                {"": weights},
                lambda: -every(weights.detach(), kept.expand(len(members), -1))[1],
                self.patience,
            )

        def set_gradients(batch: Tensor) -> Tensor:
            weights.grad, losses = every(weights.detach(), batch)
            return losses

        def epochs() -> Iterator[Iterable[Tensor]]:
            size = len(members), len(rows)
            for _ in range(self.num_epochs):
                # Each member has an order of its own.
                keys = torch.rand(size, generator=generator, device=members.device)
                yield rows[keys.argsort(-1)].split(self.batch_size, -1)

        for _ in train_stacked(
            set_gradients, {"": weights}, optimizer, epochs(), stopping=stopping
        ):
            yield (weights.detach() if stopping is None else stopping.best[""]).clone()
        scores = None if stopping is None else stopping.scores
        if scores is not None and not bool(scores.isfinite().all()):
            bad = (~scores.isfinite()).nonzero().flatten().tolist()
            raise ValueError(
                f"the validation loss of members {bad} was never finite: lower the learning rate"
            )


warm_start = WarmStart
