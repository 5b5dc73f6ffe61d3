"""Predictions of batches, for which the draws of one call are the same in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from tyxe import check
from tyxe.bnn.batches import batches_to_predict, device_for, is_loader, on_device
from tyxe.data import concatenated
from tyxe.rng import RandomStream

T = TypeVar("T")


class ReplayedDraws:
    """Draws that are the same for each batch of one call.

    They are made with the random numbers that PyTorch's generator would have given next, in a
    stream of their own. Where there may be several batches, `is_replayed`, it reaches each
    operation by itself, which takes longer: what other threads draw makes no draw another one.
    """

    def __init__(self, is_replayed: bool = False) -> None:
        self.is_replayed = is_replayed
        # Of the norms of the net at each draw, a list to fill.
        self.statistics: list[Any] = []
        # The random numbers of each draw, of which the last is where the next one starts.
        self._streams: list[RandomStream] = []

    def start(self) -> None:
        """Take random numbers, unless that was done."""
        if not self._streams:
            self._streams = [RandomStream.branch()]

    def over(self, draws: Iterator[T]) -> Iterator[T]:
        """Yield the draws that an iterator makes, from the same random numbers in each call."""
        self.start()
        for index in itertools.count():
            stream = self._streams[index].copy() if self.is_replayed else self._streams[0]
            with stream if self.is_replayed else stream.as_generators():
                draw = next(draws, None)
            if draw is None:
                return
            if self.is_replayed and index + 1 == len(self._streams):
                self._streams.append(stream)
            yield draw


# Those of the member of an ensemble, whose batches are one call each.
_DRAWS: ContextVar[ReplayedDraws | None] = ContextVar("_DRAWS", default=None)


class DrawsOfEach:
    """For each of several BNNs the same draws in all batches of one call.

    `first` is of the first BNN; each of the others starts its own in the first batch.
    """

    def __init__(self) -> None:
        self._of: list[ReplayedDraws] = []

    def over(self, bnns: Iterable[T], first: ReplayedDraws) -> Iterator[tuple[T, ReplayedDraws]]:
        """Yield BNNs with their draws, which their own predictions take in the meantime."""
        for index, bnn in enumerate(bnns):
            if index == len(self._of):
                self._of.append(ReplayedDraws(first.is_replayed) if index else first)
            token = _DRAWS.set(self._of[index])
            try:
                yield bnn, self._of[index]
            finally:
                _DRAWS.reset(token)


_SMALLER = "pass a smaller batch_size, or vectorize=False"


def map_batches(
    bnn: Any,
    inputs: tuple[Any, ...],
    batch_size: int | None,
    function: Callable[[Any, Any, ReplayedDraws], Any],
    dim: int,
    targets: Any = None,
    gradients: bool = False,
) -> Any:
    """Return a function's values on batches, concatenated along `dim`.

    It runs on the BNN's device, in eval mode, and with or without gradients.
    """
    device = device_for(bnn)
    given = inputs[0] if len(inputs) == 1 else inputs
    has_batches = is_loader(given) or batch_size is not None
    again, found = _DRAWS.get() or ReplayedDraws(has_batches), []
    if is_loader(given) and not isinstance(given, list):
        again.start()  # before the loader takes random numbers
    for rows, labels in batches_to_predict(given, targets, batch_size):
        rows, labels = on_device((rows, labels), device)
        with bnn._predicting(gradients), check.memory_remedy("a batch's predictions", _SMALLER):
            found.append(function(rows, labels, again))
    return concatenated(found, dim)
