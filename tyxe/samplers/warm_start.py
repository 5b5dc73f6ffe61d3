"""Members of a deep ensemble, trained all at once, as starts of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
from tyxe.samplers.potential import gradients
from tyxe.stacked_training import EarlyStopping, train_stacked

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
