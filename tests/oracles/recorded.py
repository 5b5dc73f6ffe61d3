"""What a CUDA graph does, on a processor: operations on fixed places in memory, played again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tyxe.rng import current_stream


class Recorded:
    """A stand-in for `tyxe.program.Capture`, which needs no GPU.

    Recording leaves what the function changes as it was, and random numbers too. A run repeats the
    operations on the same tensors: what Python did between them, numbers of its own included, is
    what it was.
    """

    made = 0

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        if current_stream() is not None:
            raise RuntimeError("a graph takes random numbers from the generators of PyTorch alone")
        state, recorder = torch.get_rng_state(), _Recorder()
        with recorder:
            self.returned = function()
        for tensor, value in reversed(recorder.before):
            tensor.detach().copy_(value)
        torch.set_rng_state(state)
        self._calls = recorder.calls
        for found in tree_leaves(self.returned):
            if isinstance(found, Tensor):
                found.detach().fill_(0)  # a recording has no values
        type(self).made += 1

    @torch.no_grad()
    def __call__(self) -> Any:
        for func, args, kwargs, found in self._calls:
            for place, value in zip(
                tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        return self.returned


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(func):
            raise RuntimeError("a number was read while the steps were recorded")
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Batch norm's statistics are not in its schema.
        if func._schema.is_mutable or "batch_norm" in str(func):
            foreign = [t for t in given if t.untyped_storage().data_ptr() not in self._own]
            self.before += [(tensor, tensor.clone()) for tensor in foreign]
        found = func(*args, **kwargs)
        theirs = {tensor.untyped_storage().data_ptr() for tensor in given}
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in theirs:
                self._own.add(leaf.untyped_storage().data_ptr())
        args, kwargs, found = tree_map(_bare, (args, kwargs, found))
        self.calls.append((func, args, kwargs, found))
        return found


def _bare(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
