"""A BNN's net on batches, at several draws of its weights that are the same in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tyxe import check
from tyxe.bnn.base import BNN
from tyxe.bnn.batches import batches_to_predict, device_for, is_loader, on_device
from tyxe.bnn.standin import StandIn
from tyxe.data import Picking, concatenated
from tyxe.poutine.report import note
from tyxe.predictive.forwards import MOST_GIVEN, SiteFreePrefix, Statistics, has_hooks, is_faster
from tyxe.rng import RandomStream, set_torch_rng, torch_rng
from tyxe.threads import exclusive, handlers
from tyxe.util import Inputs, at_each, in_function_transform, kind_of_batch, same_numbers

T = TypeVar("T")

# Most numbers of a group of draws, which are made at once while no other thread draws.
GROUPED = 2**16


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
        # The random numbers of each group of draws, of which the last is where the next starts.
        self._streams: list[RandomStream] = []

    def start(self) -> None:
        """Take random numbers, unless that was done."""
        if not self._streams:
            self._streams = [RandomStream.branch()]

    def over(self, draws: Iterator[T], numbers: int = GROUPED) -> Iterator[T]:
        """Yield the draws that an iterator makes, from the same random numbers in each call.

        `numbers` is how many there are in a draw. Draws of at most `GROUPED` numbers are made in
        groups of as many numbers, while no other thread draws. During larger ones others go on.
        Without it, each is a group of its own.
        """
        self.start()
        is_apart = self.is_replayed or numbers > GROUPED
        count = max(1, GROUPED // max(1, numbers))
        for index in itertools.count():
            stream = self._streams[index].copy() if self.is_replayed else self._streams[0]
            with stream if is_apart else stream.as_generators():
                group = [*itertools.islice(draws, count)]
            if self.is_replayed and index + 1 == len(self._streams):
                self._streams.append(stream)
            yield from group
            if len(group) < count:
                return


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


def not_vectorized(why: str, error: Exception | None = None) -> NoReturn:
    """Raise a ValueError that says why a net or a fit is not vectorized."""
    raise ValueError(f"vectorize=True {why}; leave vectorize out") from error


def stacked(draws: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return draws as tensors `(S, ...)` by site."""
    rows = [*draws]
    return {name: torch.stack([values[name] for values in rows]) for name in rows[0]}


def unstacked(together: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the draws that are stacked in tensors `(S, ...)` by site."""
    rows = zip(*(values.unbind() for values in together.values()), strict=True)
    return (dict(zip(together, row, strict=True)) for row in rows)


class NetOnBatch:
    """A net on one batch, as a function of the values of its sites.

    One stand-in runs all passes; where gradients are recorded, which may be taken through earlier
    ones, each has its own. Modules that no site reaches run in the first pass, and what they return
    is kept. A net can hand a draw over where this is not seen, such as in a global. So passes are
    compared with those of the whole net, until one at another draw than the first has been the
    same. `keeps` says whether there are passes for which something is to be kept.
    """

    def __init__(self, bnn: BNN, inputs: Inputs, keeps: bool) -> None:
        self._bnn, self._inputs, self._keeps = bnn, inputs, keeps
        self._stand_in: StandIn | None = None
        self._prefix: SiteFreePrefix | None = None
        self._first: Any = None
        self._is_plain = False

    def __call__(self, values: Mapping[str, Tensor], statistics: Statistics | None = None) -> Any:
        """Return the net's output at values of the sites, with statistics of norms for its own."""
        if torch.is_grad_enabled():
            return self._bnn._stand_in(values, statistics)(self._inputs)
        if self._stand_in is None:
            self._stand_in = self._bnn._stand_in(values, statistics)
            self._prefix = self._prefix_of(self._stand_in)
        else:
            self._stand_in.put(self._bnn._tensors_at(values), statistics)
        if self._is_plain:
            return self._stand_in.call_plainly(self._inputs, self._prefix)
        if self._prefix is None or self._is_known():
            return self._stand_in(self._inputs, self._prefix)
        if in_function_transform():  # where nothing can be compared
            return self._stand_in(self._inputs)
        if self._first is None:
            self._first = self._stand_in(self._inputs, self._prefix)
            return self._first
        return self._compared(self._stand_in, self._prefix)

    def one_by_one(self, stacked: Mapping[str, Tensor]) -> Tensor:
        """Return the net's outputs `(S, ...)` at draws that are stacked by site."""
        return torch.stack([self(values) for values in unstacked(stacked)])

    def at_once(self, stacked: Mapping[str, Tensor], size: int | None = None) -> Tensor:
        """Return what `one_by_one` does, by `torch.vmap` of so many draws at a time."""
        return at_each(self, stacked, size)

    def many(self, stacked: Mapping[str, Tensor]) -> Tensor:
        """Return what `one_by_one` does, in the way that is taken by default."""
        return self.at_many(stacked) if self.may_run_at_once() else self.one_by_one(stacked)

    def look(self, draws: Iterable[Mapping[str, Tensor]]) -> None:
        """Make passes until one has been compared, for passes in a transform, where none can be."""
        for values in draws if self._keeps else ():
            has_looked = self._stand_in is not None and self._prefix is None
            if has_looked or self._is_known():
                return
            self(values)

    # ------------------------------------------------------------------ many draws at once

    def may_run_at_once(self) -> bool:
        """Whether one pass for many draws may be faster, and nothing has to see single draws.

        Handlers and hooks have to, and gradients, for which each draw has its own stand-in.
        """
        runtime, owners = self._bnn._runtime, self._owners()
        if torch.is_grad_enabled() or in_function_transform() or has_hooks(self._bnn.net, Picking):
            return False
        if not runtime.one_pass.is_right:
            note("Draws run one by one: one pass for all of them is slower, or was not the same.")
        return runtime.one_pass.is_right and not handlers() and self._is_faster(owners)

    def at_many(self, stacked: Mapping[str, Tensor]) -> Tensor:
        """Return what `one_by_one` does, in one pass where that is faster and was seen right."""
        one_pass, kind = self._bnn._runtime.one_pass, None
        while kind != (now := self._kind()):  # until a stand-in finds no change in the net
            kind, self._is_plain = now, one_pass.knows(now)
            together = partial(self._at_once_in_memory, stacked)
            outputs = one_pass(together, partial(self._looked_at, stacked), kind)
        return outputs

    def _looked_at(self, stacked: Mapping[str, Tensor]) -> Tensor:
        """Return what `one_by_one` does, and rule out what one pass would not do as well."""
        self._is_plain &= self._bnn._runtime.one_pass.is_right
        outputs, stand_in, prefix = self.one_by_one(stacked), self._stand_in, self._prefix
        assert stand_in is not None
        ends = {*()} if prefix is None or prefix.runs_after else self._owners()
        is_plain = stand_in.is_random is False and not stand_in.has_left
        self._bnn._runtime.one_pass.is_right &= is_plain and self._is_faster(ends)
        return outputs

    def _owners(self) -> set[nn.Module]:
        """Return the modules that have sites."""
        return {part for slots in self._bnn._slots.values() for part, _ in slots}

    def _is_faster(self, ends: set[nn.Module]) -> bool:
        """Whether one pass is faster, if the net ends in some modules."""
        bnn = self._bnn
        is_last = len(ends) == 1 and {*map(type, ends)} == {nn.Linear}
        return is_faster(bnn._in_places().values(), bnn._like.device, is_last)

    def _at_once_in_memory(self, stacked: Mapping[str, Tensor]) -> Tensor:
        runtime, count = self._bnn._runtime, len(next(iter(stacked.values())))
        given = sum(t.numel() for t in tree_leaves(self._inputs) if isinstance(t, Tensor))
        size = min(count, runtime.most_at_once, max(1, MOST_GIVEN // max(1, given)))
        if self._is_plain and self._stand_in is None and self._is_known():
            # What is kept is made outside of the transform, in which all that runs takes longer.
            self(next(unstacked(stacked)))
        try:
            return self.at_once(stacked, size if size < count else None)
        except torch.OutOfMemoryError:
            runtime.most_at_once = max(1, size // 2)
            raise

    # ------------------------------------------------------------------ what is kept

    def _is_known(self) -> bool:
        """Whether passes have been compared for such batches, and the net has not changed since."""
        return self._kind() in self._bnn._runtime.compared

    def _kind(self) -> Any:
        return kind_of_batch(self._inputs), self._bnn._outline.version

    def _compared(self, stand_in: StandIn, prefix: SiteFreePrefix) -> Any:
        """Return the output of a pass, after a comparison with one of the whole net."""
        if not prefix.has_kept:
            self._prefix = None
            return stand_in(self._inputs)
        runtime, kind = self._bnn._runtime, self._kind()
        with exclusive():
            numbers = torch_rng()
            output = stand_in(self._inputs, prefix)
            set_torch_rng(numbers)
            whole = stand_in(self._inputs)
        if not same_numbers(output, whole):
            self._prefix, runtime.keeps_prefix = None, False
        elif not same_numbers(self._first, whole):  # or the two draws are one, and nothing is known
            runtime.compared.add(kind)
            self._first = None
        return whole

    def _prefix_of(self, stand_in: StandIn) -> SiteFreePrefix | None:
        if self._keeps and not self._bnn._runtime.keeps_prefix:
            note(
                "The whole net runs for each draw: what modules without sites return has been seen "
                "to depend on the draw."
            )
        if not self._keeps or not self._bnn._runtime.keeps_prefix:
            return None
        owners, may_draw = map(stand_in.part, self._owners()), stand_in.is_random is not False
        return SiteFreePrefix(stand_in.net, owners, self._inputs, may_draw)
