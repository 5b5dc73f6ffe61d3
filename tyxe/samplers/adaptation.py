"""Adaptation of step sizes and mass matrices during warm-up, for all chains at once.

States are named tuples of tensors whose first dimension counts chains. An update changes only the
chains of a mask, so chains may be at different transitions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def choose(mask: Tensor, new: T, old: T) -> T:
    """Return nested tuples of tensors with `new` where a mask `(chains,)` holds, else `old`."""
    chosen: Any
    if isinstance(new, Tensor):
        assert isinstance(old, Tensor)
        shaped = mask.reshape(mask.shape + (1,) * (new.dim() - mask.dim()))
        chosen = torch.where(shaped, new, old)
    else:
        parts = [choose(mask, n, o) for n, o in zip(new, old, strict=True)]  # type: ignore[call-overload]
        chosen = tuple(parts) if type(new) is tuple else type(new)(*parts)
    return chosen


class DualAveraging(NamedTuple):
    """Step sizes that reach a wanted acceptance probability (Hoffman, Gelman 2014, eq. 6).

    `log_step` is used while adapting, `log_average` after it; all are `(chains,)`.
    """

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    number: Tensor
    center: Tensor

    @classmethod
    def start(cls, step_size: Tensor) -> DualAveraging:
        """Return the state before the first update, which pulls towards ten times the step size."""
        zero, log_step = torch.zeros_like(step_size), step_size.log()
        return cls(log_step, log_step, zero, zero, (10 * step_size).log())

    def updated(self, acceptance: Tensor, target: float) -> DualAveraging:
        """Return the state after a transition's acceptance probability, `(chains,)`."""
        number = self.number + 1
        weight = 1 / (number + 10)
        error = (1 - weight) * self.error + weight * (target - acceptance)
        log_step = self.center - error * number.sqrt() / 0.05
        decay = number**-0.75
        average = decay * log_step + (1 - decay) * self.log_average
        return DualAveraging(log_step, average, error, number, self.center)


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of positions, by Welford's recursion."""

    number: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def start(cls, position: Tensor) -> Moments:
        """Return the state of no positions yet, for positions `(chains, d)`."""
        zero = torch.zeros_like(position)
        return cls(torch.zeros_like(position[:, 0]), zero, zero)

    def updated(self, position: Tensor) -> Moments:
        """Return the state with one more position of each chain."""
        number = self.number + 1
        before = position - self.mean
        mean = self.mean + before / number[:, None]
        return Moments(number, mean, self.squares + before * (position - mean))

    def variance(self) -> Tensor:
        """Return the variances, shrunk to 1e-3 with the weight of five observations, as in Stan."""
        number = self.number[:, None]
        plain = self.squares / (number - 1).clamp(min=1)
        return number / (number + 5) * plain + 1e-3 * 5 / (number + 5)


def windows(num_steps: int) -> tuple[Tensor, Tensor]:
    """Return which transitions of a warm-up add to the mass matrix, and after which it changes.

    An initial part, windows of 25, 50, 100, ... transitions of which the last is stretched, and a
    last part, as Stan's. Both are masks `(num_steps,)`.
    """
    first, window, last = 75, 25, 50
    if num_steps < first + window + last:
        first, last = int(0.15 * num_steps), int(0.1 * num_steps)
        window = num_steps - first - last
    collects = torch.zeros(num_steps, dtype=torch.bool, device="cpu")
    ends = torch.zeros(num_steps, dtype=torch.bool, device="cpu")
    # Of fewer than 50 the last part is too short to find a step size for another mass.
    if num_steps >= 50:
        stop = num_steps - last
        collects[first:stop] = True
        while first < stop:
            # The last window is stretched where the next would not fit.
            first = first + window if first + 3 * window <= stop else stop
            window *= 2
            ends[first - 1] = True
    return collects, ends
