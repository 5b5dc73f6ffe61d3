"""Batches as loaders yield them, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tyxe.util import tree_map_tensors

__all__ = [
    "batches_of",
    "check_has_targets",
    "collect",
    "is_loader",
    "not_empty",
    "split_rows",
]


def is_loader(inputs: Any) -> bool:
    """Say whether something stands for batches: iterable, and neither tensor nor container."""
    return not isinstance(inputs, Tensor | tuple | list | Mapping) and (
        hasattr(inputs, "__iter__") and not hasattr(inputs, "to")
    )


def not_empty(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches, of which there has to be one.

    Raises:
        ValueError: there is none.
    """
    empty = True
    for batch in loader:
        empty = False
        yield batch
    if empty:
        raise ValueError(
            "the loader is empty: it yields no batch (a generator can be used once only)"
        )


def check_has_targets(targets: Any) -> None:
    """Raise where a loader for evaluation gave inputs alone.

    Raises:
        ValueError: there are no targets.
    """
    if targets is None:
        raise ValueError("the loader yields no targets; evaluate needs (inputs, y)")


def batches_of(loader: Iterable[Any], device: Any = None) -> Iterator[tuple[Any, Tensor]]:
    """Yield `(inputs, targets)` from a loader, on a device.

    Inputs are a tensor (or a graph), a tuple or list of several arguments, or a mapping of
    keyword arguments.

    Raises:
        TypeError: the loader cannot be iterated over.
        ValueError: it is empty, or yields something other than pairs.
    """
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            f"data_loader is a {type(loader).__name__}; expected an iterable of (inputs, targets), "
            "such as a torch.utils.data.DataLoader or [(x, y)]"
        )
    for batch in not_empty(loader):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(f"the loader yields {_describe(batch)}; {_EXPECTED}")
        inputs, targets = batch
        if not isinstance(targets, Tensor):
            raise ValueError(
                f"the loader yields targets of type {type(targets).__name__}; {_EXPECTED}"
            )
        if device is not None:
            inputs, targets = tree_map_tensors(lambda t: t.to(device), (inputs, targets))
        yield inputs, targets


_EXPECTED = (
    "expected pairs (inputs, targets) with a tensor of targets, and inputs a tensor, a tuple of "
    "arguments ((x1, x2), y), or a mapping of keyword arguments"
)


def _describe(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)} elements"
    if isinstance(batch, Mapping):
        return f"a mapping with keys {', '.join(map(str, batch))}"
    return f"a {type(batch).__name__}"


def split_rows(tree: Any, size: int) -> list[Any]:
    """Cut all tensors of a batch of inputs into pieces of at most `size` rows."""
    if isinstance(tree, Tensor):
        return list(tree.split(size))
    if isinstance(tree, Mapping):
        pieces = [split_rows(value, size) for value in tree.values()]
        return [dict(zip(tree, piece, strict=True)) for piece in zip(*pieces, strict=True)]
    if isinstance(tree, tuple | list) and not hasattr(tree, "to"):
        rows = zip(*(split_rows(item, size) for item in tree), strict=True)
        return [_like(tree, piece) for piece in rows]
    raise TypeError(f"batch_size cannot cut a {type(tree).__name__}; pass a loader instead")


def _like(container: Any, items: Iterable[Any]) -> Any:
    """A tuple of items; a named one, which is a single argument, where the container is."""
    return type(container)(*items) if hasattr(container, "_fields") else tuple(items)


def collect(loader: Iterable[Any], device: Any = None) -> tuple[Any, Tensor]:
    """Concatenate all batches of a loader into one."""
    batches = list(batches_of(loader, device))
    if len(batches) == 1:
        return batches[0]
    inputs = _concatenate([inputs for inputs, _ in batches])
    return inputs, torch.cat([targets for _, targets in batches])


def _concatenate(pieces: list[Any]) -> Any:
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(pieces)
    if isinstance(first, Mapping):
        return {key: _concatenate([piece[key] for piece in pieces]) for key in first}
    if isinstance(first, tuple | list) and not hasattr(first, "to"):
        return _like(first, [_concatenate(list(items)) for items in zip(*pieces, strict=True)])
    raise TypeError(f"inputs of type {type(first).__name__} cannot be concatenated")
