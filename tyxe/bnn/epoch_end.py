"""What happens after an epoch of a fit: a look at held-out data, a callback, perhaps the end."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tyxe import check
from tyxe.bnn.batches import batches_of
from tyxe.bnn.checkpoint import BestEpoch, History
from tyxe.bnn.training import FitOptions
from tyxe.processes import Processes
from tyxe.rng import RandomStream


class EpochEnd:
    """What happens after each epoch: a callback, and held-out data that may end the fit.

    Ties of the held-out log-likelihood count as no improvement. Several processes decide together,
    by sums over what each has: held-out data, a callback that ends the fit.
    """

    def __init__(
        self, bnn: Any, callback: Any, options: FitOptions, device: Any, processes: Processes
    ) -> None:
        check.one_of("callback", callback, Callable | None, "a function, or None")
        self._bnn, self._callback, self._options = bnn, callback, options
        self._device, self._processes = device, processes
        validates = options.validation is not None
        found = processes.total([validates, validates and options.restore_best])
        self.best = BestEpoch() if found[0] else None
        self._restores = bool(found[1])

    @property
    def _is_over(self) -> bool:
        patience = self._options.patience
        return None not in (self.best, patience) and self.best.waited >= patience  # type: ignore[union-attr,operator]

    def go_on_from(self, best: BestEpoch | None) -> None:
        """Take up the best epoch of an earlier fit, if this one can go back to it."""
        if None not in (self.best, best) and (best.state or not self._restores):  # type: ignore[union-attr]
            self.best = best

    def epochs_left(self, count: int) -> int:
        """Return how many of so many epochs are left, none where the earlier fit was over."""
        return 0 if self._processes.total([self._is_over])[0] else count

    def ends(self, epoch: int, history: History) -> bool:
        """Look at an epoch that has ended, and say whether the fit does."""
        if self.best is not None:
            self._look(self.best, history)
        self._bnn._end_epoch(epoch)
        with self._processes.all_or_none():
            called = self._callback is not None
            stops = bool(called and self._callback(self._bnn, epoch, history.loss[-1]))
        return self._processes.total([stops or self._is_over])[0] > 0

    def _look(self, best: BestEpoch, history: History) -> None:
        loader = self._options.validation
        with self._processes.all_or_none():
            own = (0.0, 0.0) if loader is None else held_out_sums(self._bnn, loader, self._device)
        total, points = self._processes.total([*own])
        found = total / points if points else math.nan
        history.validation.append(found)
        best.waited += 1
        if found > best.score:
            best.score, best.waited = found, 0
            best.state = copy.deepcopy(self._bnn.state_dict()) if self._restores else None

    def restore_best(self) -> None:
        """Go back to the epoch that was best, and let a further fit wait anew."""
        best = self.best
        if best is None or not best.waited:
            return
        is_over = self._is_over
        if best.state is not None:
            stage = self._bnn._stage
            self._bnn.load_state_dict(best.state)
            self._bnn._stage = f"{stage}, weights of the best"
        if is_over or best.state is not None:
            best.waited, self._bnn._pending = 0, None


def draws_to_judge(bnn: Any) -> int:
    """Return the draws by which a training is judged: 8, or 0 of what has no spread yet."""
    return 8 if "scale" in bnn._parameter_kinds().values() else 0


def held_out_sums(bnn: Any, loader: Iterable[Any], device: Any) -> tuple[float, float]:
    """Return the log-likelihood of held-out data, in nats, and how many points it is of.

    It is by the same draws in each call.
    """
    draws = draws_to_judge(bnn)
    total = points = 0.0
    for inputs, targets in batches_of(bnn._to_evaluate(loader), device):
        with RandomStream(seed=0):
            found = bnn.evaluate(inputs, targets, draws)[1]
        total += float(found if isinstance(found, Tensor) else found["joint"])
        points += float(bnn.likelihood.count(targets))
    return total, points
