"""Batches of loaders: checking, cutting and joining them, and predictions for each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from tyxe import check
from tyxe.check import described
from tyxe.data import Batch, Targets, Unpacked, concatenate_targets, read_targets
from tyxe.rng import RandomStream
from tyxe.util import (
    Inputs,
    is_constant,
    outside_inference,
    outside_of_inference,
    tree_map_tensors,
)

T = TypeVar("T")


def is_loader(inputs: Inputs) -> bool:
    """Whether inputs are a loader: a list, or iterable but no tensor, container or graph.

    An array of another library is a TypeError: its rows are not batches.
    """
    if hasattr(inputs, "__array__") and not isinstance(inputs, Tensor):
        given = described(inputs)
        raise TypeError(f"inputs are {given}; pass a tensor: torch.as_tensor(inputs).float()")
    _check_no_dataset(inputs)
    is_data = isinstance(inputs, Tensor | tuple | Mapping)
    return not is_data and hasattr(inputs, "__iter__") and not hasattr(inputs, "to")


def _check_no_dataset(loader: Any) -> None:
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise TypeError(
            f"{described(loader)} yields points, and no batches: pass "
            "torch.utils.data.DataLoader(dataset, batch_size)"
        )


def not_empty(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches, or raise a ValueError if there is none."""
    empty = True
    for batch in loader:
        empty = False
        yield batch
    if empty:
        _no_batches()


def _no_batches() -> NoReturn:
    raise ValueError(
        "the loader is empty; expected a batch or more (a generator can be used once only)"
    )


def check_has_targets(targets: Any) -> None:
    """Raise where a loader for evaluation has yielded inputs without a tensor of targets."""
    if targets is None:
        raise ValueError("the loader yields no targets; evaluate needs (inputs, y)")
    check.one_of("targets", targets, Tensor | Targets, "a tensor: torch.as_tensor(targets)")


def batches_of(loader: Iterable[Any], device: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield `(inputs, targets)` from a loader, on a device; weights make `Targets` of targets.

    Inputs are a tensor or a graph, a tuple or list of arguments, or a mapping of keyword arguments.
    A loader that is empty, or yields something else or a batch without points, is a ValueError; no
    iterable is a TypeError.
    """
    check_iterable(loader)
    for batch in not_empty(loader):
        yield _checked(batch, device)


def device_for(bnn: Any, given: Any = None) -> Any:
    """Return the device for a BNN's batches: the given one, or that of its parameters.

    It is None if the parameters are on several devices: then batches stay where they are.
    """
    if given is not None:
        return torch.empty(0, device=given).device  # or PyTorch's error, before anything else
    # Each prediction asks, and `parameters()` takes longer.
    found = (tensor for part in bnn.modules() for tensor in part._parameters.values())
    devices = {tensor.device for tensor in found if tensor is not None}
    return devices.pop() if len(devices) == 1 else None


def _moved(leaf: Any, device: Any) -> Any:
    """Return a tensor or a graph on a device, without a wait where its memory is pinned."""
    if not isinstance(leaf, Tensor):
        return leaf.to(device)
    return leaf.to(device, non_blocking=leaf.device.type == "cpu" and leaf.is_pinned())


def on_device(tree: Any, device: Any) -> Any:
    """Return the contents of a batch on a device, or unchanged for None."""
    return tree if device is None else tree_map_tensors(partial(_moved, device=device), tree)


def length_of(loader: Any) -> int | None:
    """Return the length of a loader, or None if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # such as those over an `IterableDataset`
        return None


@outside_inference()
def copied(batch: Any) -> Any:
    """Return copies of a batch's contents, in case a loader fills the same memory again."""
    return tree_map(
        lambda leaf: leaf.clone() if hasattr(leaf, "clone") else copy.deepcopy(leaf), batch
    )


def all_batches(loader: Iterable[Any], device: Any = None) -> list[tuple[Any, Any]]:
    """Return all batches as `batches_of` yields them, copied unless they are in a list already."""
    batches = batches_of(loader, device)
    return [*batches] if isinstance(loader, list) else [*map(copied, batches)]


def check_iterable(loader: Any, name: str = "data_loader") -> None:
    """Raise a TypeError for objects that do not yield batches."""
    _check_no_dataset(loader)
    pairs = "(inputs, targets), such as a torch.utils.data.DataLoader or [(x, y)]"
    expected = f"a loader, an iterable of {pairs}"
    parts = loader if isinstance(loader, tuple) else [loader]
    is_data = isinstance(loader, Mapping) or any(hasattr(type(p), "__array__") for p in parts)
    check.one_of(name, loader, () if is_data else Iterable, expected)


def _checked(batch: Any, device: Any) -> tuple[Any, Any]:
    """Return inputs and targets on a device, or raise where a batch is something else."""
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise ValueError(f"the loader yields {_describe(batch)}; {_EXPECTED}")
    inputs, targets, *weights = batch
    if not isinstance(targets, Tensor | Targets):
        raise ValueError(f"the loader yields targets of type {type(targets).__name__}; {_EXPECTED}")
    shape = Targets.of(targets).values.shape
    if not shape:
        raise ValueError(
            "targets are one number; expected one row for each point, (n, ...), as a "
            "torch.utils.data.DataLoader makes of a dataset's points"
        )
    if not shape.numel():
        raise ValueError(
            f"the loader yields a batch without points, of targets {tuple(shape)}; leave it out"
        )
    targets = read_targets(targets, *weights)
    inputs, targets = outside_of_inference(on_device((inputs, targets), device))
    return Batch(_arguments(inputs), targets)


def _arguments(inputs: Any) -> Any:
    """Return inputs of a batch, where a list, which would be a loader, holds arguments."""
    return tuple(inputs) if isinstance(inputs, list) else inputs


class OwnBatches:
    """Batches of a loader, epoch after epoch, in an order given by their own seed.

    Neither other users of PyTorch's generators nor an interrupt between two batches change it.
    `in_epoch` is the number of points of the latest whole epoch, by `count` of targets; None before
    its end.
    """

    def __init__(
        self, loader: Iterable[Any], device: Any, seed: int, count: Callable[[Any], Any] = len
    ) -> None:
        check_iterable(loader)
        self._loader, self._device = _with_own_iterator(loader), device
        self._iterator: Iterator[Any] = iter(())
        self._points, self._count = 0.0, count
        self.in_epoch: float | None = None
        self._stream = RandomStream(seed)

    def take(self) -> tuple[Any, Any]:
        """Return the next batch; errors are those of `batches_of`."""
        return self._advance(anew=False) or self._advance(anew=True) or _no_batches()

    def epoch(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of a new epoch."""
        batch: Any = self._advance(anew=True) or _no_batches()
        while batch is not None:
            yield batch
            batch = self._advance(anew=False)

    def _advance(self, anew: bool) -> tuple[Any, Any] | None:
        with self._stream:
            if anew:
                self.in_epoch, self._points = self._points or None, 0.0
                self._iterator = iter(self._loader)
            batch = next(self._iterator, self)
        if batch is self:
            return None
        found = _checked(batch, self._device)
        # Those of other seeds may be taken from the same loader before this one is used.
        found = found if isinstance(self._loader, list) else copied(found)
        self._points += float(self._count(found[1]))
        return found

    def close(self) -> None:
        """Close the loader's iterator and its workers; the next batch starts a new epoch."""
        self._iterator = iter(())
        if isinstance(self._loader, DataLoader):
            self._loader._iterator = None


def _with_own_iterator(loader: Any) -> Any:
    if isinstance(loader, Unpacked):
        return Unpacked(_with_own_iterator(loader.loader), loader.unpack)
    if isinstance(loader, DataLoader):
        # Persistent workers have one iterator, which each `iter` of their loader starts anew.
        loader = own = copy.copy(loader)
        own._iterator = None
    return loader


_EXPECTED = (
    "expected (inputs, targets), or (inputs, targets, weights), with a tensor of targets, and "
    "inputs a tensor, a tuple of arguments ((x1, x2), y), or a mapping of keyword arguments; for "
    "other batches pass unpack=, a function from a batch to these; a single batch is a list of one "
    "pair, [(x, y)]"
)


def _describe(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)} elements"
    if isinstance(batch, Mapping):
        return f"a mapping with keys {', '.join(map(str, batch))}"
    return f"a {type(batch).__name__}"


def batches_to_predict(inputs: Inputs, targets: Any, batch_size: int | None) -> Iterable[Any]:
    """Return pairs of inputs and targets (or None), from a loader or from one batch.

    A loader yields pairs or inputs alone; a batch is cut into pieces of `batch_size` rows.
    """
    batch_size = None if batch_size is None else check.count("batch_size", batch_size)
    if is_loader(inputs):
        return map(_as_pair, not_empty(inputs))
    targets = None if targets is None else read_targets(targets)
    if batch_size is None:
        return [(inputs, targets)]
    pieces = split_rows(inputs, batch_size)
    labels = [None] * len(pieces) if targets is None else list(targets.split(batch_size))
    return zip(pieces, labels, strict=True)


def _as_pair(batch: Any) -> tuple[Any, Any]:
    """Return a loader's batch as inputs and targets, or None where it has inputs alone."""
    if not isinstance(batch, tuple | list):
        return batch, None
    if len(batch) > 3:
        raise ValueError(
            f"the loader yields {len(batch)} elements; expected (inputs, targets), with several "
            "arguments of the net in a tuple, ((x1, x2), y), or (inputs, targets, weights)"
        )
    inputs, labels = _arguments(batch[0]), batch[1] if len(batch) > 1 else None
    is_known = isinstance(labels, Tensor | Targets)
    return inputs, read_targets(labels, *batch[2:]) if is_known else labels


def split_rows(tree: Any, size: int) -> list[Any]:
    """Cut all tensors of a batch of inputs into pieces of at most `size` rows.

    Numbers, strings and None go into every piece. Other objects without rows are a TypeError,
    different numbers of rows a ValueError.
    """
    rows = set(_numbers_of_rows(tree))
    if len(rows) != 1:
        found = " and ".join(map(str, sorted(rows))) or "no"
        raise ValueError(f"the inputs have {found} rows; batch_size cuts tensors of one number")
    starts = range(0, max(rows.pop(), 1), size)
    return [take_rows(tree, slice(start, start + size)) for start in starts]


def _numbers_of_rows(tree: Any) -> Iterator[int]:
    if is_constant(tree):
        return
    if isinstance(tree, Tensor):
        yield len(tree)
    elif isinstance(tree, Mapping | tuple | list) and not hasattr(tree, "to"):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _numbers_of_rows(item)
    else:
        raise TypeError(f"batch_size cannot cut a {type(tree).__name__}; pass a loader instead")


def take_rows(tree: Any, rows: slice | Tensor) -> Any:
    """Return some rows, a slice or indices, of every tensor of a batch of inputs."""

    def taken(one: Any) -> Any:
        if is_constant(one):
            return one
        return one[rows if isinstance(rows, slice) else rows.to(one.device)]

    return tree_map_tensors(taken, tree)


def collect(loader: Iterable[Any], device: Any = None) -> tuple[Any, Any]:
    """Concatenate all batches of a loader into one."""
    batches = all_batches(loader, device)
    if len(batches) == 1:
        return batches[0]
    with outside_inference():
        inputs = _concatenate([inputs for inputs, _ in batches])
        return Batch(inputs, concatenate_targets([targets for _, targets in batches]))


def _concatenate(pieces: list[Any]) -> Any:
    first = pieces[0]
    if is_constant(first) and all(is_constant(piece) and piece == first for piece in pieces):
        return first
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(pieces)
    if isinstance(first, Mapping):
        return {key: _concatenate([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple | list) and not hasattr(first, "to"):
        items = [_concatenate(list(parts)) for parts in zip(*pieces, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if is_constant(first):
        raise ValueError(
            f"an argument of the net is {first} in one batch and something else in another, so the "
            "batches do not make one; give all of them the same"
        )
    raise TypeError(f"inputs of type {type(first).__name__} cannot be concatenated")
