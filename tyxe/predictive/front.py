"""The front of a net, which no site reaches: run once for a batch, and kept for all passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tyxe.poutine.draw import Places
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.util import Inputs, is_constant


class Front:
    """Passes of a net on one batch, in which modules without sites run once.

    The first pass keeps what the outermost of them return that are called with constants, and with
    tensors of the batch or of each other. Later ones take it where these and a module's own are the
    same, by identity and version: results are bit for bit those of the net. What the forward of a
    module with sites does itself, and what follows from it, runs each time. No gradients are kept.

    A module of which a part is in train mode or has hooks is not kept, but those that it calls may
    be; its own hooks run each time. Nor is one that draws random numbers, changes its buffers,
    reads sites of others, or returns more than tensors and constants. Other things it does once.

    Args:
        net: the net, in the modes that it is run in.
        places: the places of its sites.
        inputs: the batch.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> front = Front(net, {"1.weight": [(net[1], "weight")]}, x := torch.ones(4, 2))
        >>> front(lambda: net(x)).shape
        torch.Size([4, 1])
    """

    def __init__(self, net: nn.Module, places: Places, inputs: Inputs) -> None:
        self._owners = {module for slots in places.values() for module, _ in slots}
        parts = {module: [*module.modules()] for module in net.modules()}
        self._tensors = {
            module: [held for part in own for held in (part._parameters, part._buffers)]
            for module, own in parts.items()
            if self._owners.isdisjoint(own)
            and not any(part.training for part in own)
            and not any(part._forward_hooks or part._forward_pre_hooks for part in own[1:])
        }
        if not any(map(any, self._tensors.values())):
            self._tensors = {}  # activations alone are not worth a look
        held = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and _is_fixed(t)]
        self._known = {id(t): _Known(t) for t in held}
        self._kept: dict[Any, tuple[Any, ...]] = {}
        self._records, self._inside = True, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}, "_kept": {}}  # a copy's tensors have other ids

    def __call__(self, forward: Callable[[], Any]) -> Any:
        """Return what a function returns that runs the net on the batch once."""
        self._thread, self._counts = threading.get_ident(), dict.fromkeys(self._tensors, 0)
        try:
            with _having("forward", {m: partial(self._call, m, m.forward) for m in self._tensors}):
                return forward()
        finally:
            self._records = False

    def _call(self, module: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
        forward = partial(plain, *args, **kwargs)
        if self._inside or threading.get_ident() != self._thread:
            return forward()
        given, how = tree_flatten((args, kwargs))
        marks = [self._mark(leaf) for leaf in given]
        if None in marks:
            return forward()
        self._counts[module] += 1
        state = [t for held in self._tensors[module] for t in held.values() if t is not None]
        key = (module, self._counts[module], how, *marks), _versions(state)
        if key in self._kept:
            outputs, how, stages, _ = self._kept[key]
            if not all(one.can_be_at(stage) for one, stage in stages):
                return forward()
            for one, stage in stages:
                if stage != one.stage:
                    one.tensor.data, one.stage = one.data[stage], stage
            return tree_unflatten(outputs, how)
        return self._first(key, given, state, forward) if self._records else forward()

    def _first(self, key: Any, given: list[Any], state: list[Tensor], forward: Any) -> Any:
        """Run a module, and keep what it returns if nothing speaks against it."""
        known = [self._known[id(leaf)] for leaf in given if isinstance(leaf, Tensor)]
        before = [one.tensor.detach().clone() for one in known]
        self._inside, rng = True, torch_rng()
        try:
            with _having("_parameters", {owner: {} for owner in self._owners}):
                found = forward()
        except AttributeError:  # it has no parameter of others
            set_torch_rng(rng)
            return forward()
        finally:
            self._inside = False
        leaves, how = tree_flatten(found)
        outputs = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in leaves]
        is_pure = _versions(state) == key[1] and all(map(torch.equal, rng, torch_rng()))
        if is_pure and all(map(_is_fixed, outputs)):
            for one, data in zip(known, before, strict=True):
                if one.version != one.tensor._version:
                    one.data[-1:] = data, one.tensor.data
                    one.version, one.stage = one.tensor._version, one.stage + 1
            known += [
                self._known.setdefault(id(t), _Known(t)) for t in outputs if torch.is_tensor(t)
            ]
            # The state as well, since others have its ids when it is gone.
            self._kept[key] = outputs, how, [(one, one.stage) for one in known], state
            return tree_unflatten(outputs, how)
        return found

    def _mark(self, leaf: Any) -> Any:
        """Return what an argument is in every pass, or None where that is not known."""
        if not isinstance(leaf, Tensor):
            return (type(leaf), leaf) if is_constant(leaf) else None
        known = self._known.get(id(leaf))
        return (known, known.stage) if known and known.version == leaf._version else None


class _Known:
    """A tensor of all passes, which kept modules may change in place, each to a further stage."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version, self.stage = tensor, tensor._version, 0
        self.data = [tensor.data]  # at each stage

    def can_be_at(self, stage: int) -> bool:
        if self.version != self.tensor._version or stage <= self.stage:
            return self.version == self.tensor._version
        # A later stage is another storage, and views would stay behind in this one.
        return torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata) <= 3


@contextmanager
def _having(name: str, values: Mapping[nn.Module, Any]) -> Iterator[None]:
    before = [(module.__dict__, module.__dict__.get(name)) for module in values]
    try:
        for module, value in values.items():
            module.__dict__[name] = value
        yield
    finally:
        for attributes, value in before:
            attributes[name] = value
            if value is None:
                del attributes[name]


def _is_fixed(leaf: Any) -> bool:
    """Say whether a leaf is a constant, or a tensor whose changes are seen."""
    if not isinstance(leaf, Tensor):
        return is_constant(leaf)
    is_plain = type(leaf) in (Tensor, nn.Parameter) and not leaf.is_inference()
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _versions(tensors: list[Tensor]) -> tuple[Any, ...]:
    return tuple((id(t), -1 if t.is_inference() else t._version) for t in tensors)
