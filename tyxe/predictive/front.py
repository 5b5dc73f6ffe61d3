"""The front of a net, which no site reaches: run once for a batch, and kept for all passes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tyxe.poutine.draw import METADATA, Places
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.util import Inputs, is_constant

T = TypeVar("T")


class Front:
    """Passes of a net on one batch, in which modules without sites run once.

    The first pass keeps what they return, the outermost that are called with constants and with
    tensors of the batch or of other such modules; later ones take it where these are the same, by
    identity and version, and the module's own. Results are bit for bit those of the net. What the
    forward of a module with sites computes itself runs each time, and so does what follows from it.
    No gradient reaches what is kept.

    A module is not kept, but those that it calls may be, if a part of it is in train mode or has
    hooks; its own hooks run each time. It is not either if it draws random numbers, changes its
    buffers, reads sites of others, or returns more than tensors and constants. What it leaves
    elsewhere, such as in its attributes, it leaves there once.

    Args:
        net: the net, in the modes that it is run in.
        places: the places of its sites.
        inputs: the batch.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> front = Front(net, {"1.weight": [(net[1], "weight")]}, x := torch.ones(4, 2))
        >>> front.run(lambda: net(x)).shape
        torch.Size([4, 1])
    """

    def __init__(self, net: nn.Module, places: Places, inputs: Inputs) -> None:
        self._owners = {module for slots in places.values() for module, _ in slots}
        parts = {module: [*module.modules()] for module in net.modules()}
        self._tensors = {
            module: [held for part in own for held in (part._parameters, part._buffers)]
            for module, own in parts.items()
            if self._owners.isdisjoint(own) and _is_quiet(own)
        }
        if not any(map(any, self._tensors.values())):
            self._tensors = {}  # activations alone are not worth a look
        held = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and _is_fixed(t)]
        self._known = {id(t): _Known(t, t._version) for t in held}
        self._kept: dict[Any, tuple[Any, ...]] = {}
        self._records, self._inside = True, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}, "_kept": {}}  # a copy's tensors have other ids

    def run(self, forward: Callable[[], T]) -> T:
        """Return what a function returns that runs the net on the batch once."""
        rng, changes = torch_rng(), any(one.last for one in self._known.values())
        try:
            with self._installed(), _Watch(self._known) if changes else nullcontext():
                return forward()
        except _ReadEarly:
            set_torch_rng(rng)
            self._tensors = {}
        return forward()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        before = [(module.__dict__, module.__dict__.get("forward")) for module in self._tensors]
        self._thread, self._counts = threading.get_ident(), Counter[nn.Module]()
        try:
            for module in self._tensors:
                module.__dict__["forward"] = partial(self._call, module, module.forward)
            yield
        finally:
            self._records = False
            for attributes, forward in before:
                attributes.pop("forward", None)
                attributes.update({} if forward is None else {"forward": forward})

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
            if any(one.version != one.tensor._version for one, _ in stages):
                return forward()
            for one, stage in stages:
                one.stage = stage
            return tree_unflatten(outputs, how)
        if not self._records:
            return forward()
        self._inside, rng = True, torch_rng()
        try:
            with _hidden(self._owners):
                found = tree_map(_detached, forward())
        except AttributeError:
            set_torch_rng(rng)
            return forward()
        finally:
            self._inside = False
        outputs, how = tree_flatten(found)
        is_pure = _versions(state) == key[1] and all(map(torch.equal, rng, torch_rng()))
        if is_pure and all(map(_is_fixed, outputs)):
            # The state as well, since others have its ids when it is gone.
            self._kept[key] = outputs, how, self._stages(given, outputs), state
        return found

    def _mark(self, leaf: Any) -> Any:
        """Return what an argument is in every pass, or None where that is not known."""
        if not isinstance(leaf, Tensor):
            return (type(leaf), leaf) if is_constant(leaf) else None
        known = self._known.get(id(leaf))
        return (known, known.stage) if known and known.version == leaf._version else None

    def _stages(self, given: list[Any], returned: list[Any]) -> list[tuple[_Known, int]]:
        """Return the stages of tensors after a module, which may have changed some in place."""
        found = [self._known[id(leaf)] for leaf in given if isinstance(leaf, Tensor)]
        for one in found:
            if one.version != one.tensor._version:
                one.version = one.tensor._version
                one.stage = one.last = one.last + 1
        made = [leaf for leaf in returned if isinstance(leaf, Tensor)]
        found += [self._known.setdefault(id(t), _Known(t, t._version)) for t in made]
        return [(one, one.stage) for one in found]


@dataclass(eq=False)
class _Known:
    """A tensor of all passes, and the stage that a pass has come to.

    Modules that are kept may change it in place, each to a further stage; from the second pass on
    it is at the last.
    """

    tensor: Tensor
    version: int
    stage: int = 0
    last: int = 0


class _ReadEarly(BaseException):
    """A tensor is read at a stage that is gone, by what is not kept."""


_TELLING = METADATA | {Tensor._version.__get__}  # type: ignore[attr-defined]


class _Watch(TorchFunctionMode):
    def __init__(self, known: Mapping[int, _Known]) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in () if func in _TELLING else tree_leaves((args, kwargs)):
            known = self._known.get(id(leaf))
            if known is not None and known.stage < known.last:
                raise _ReadEarly
        return func(*args, **(kwargs or {}))


@contextmanager
def _hidden(modules: set[nn.Module]) -> Iterator[None]:
    """Let modules have no parameters, so that what reads them fails."""
    before = [(module.__dict__, module._parameters) for module in modules]
    try:
        for attributes, _ in before:
            attributes["_parameters"] = {}
        yield
    finally:
        for attributes, parameters in before:
            attributes["_parameters"] = parameters


def _is_quiet(parts: list[nn.Module]) -> bool:
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in parts[1:])
    return not hooked and not any(part.training for part in parts)


def _is_fixed(leaf: Any) -> bool:
    """Say whether a leaf is a constant, or a tensor whose changes are seen."""
    if not isinstance(leaf, Tensor):
        return is_constant(leaf)
    is_plain = type(leaf) in (Tensor, nn.Parameter) and not leaf.is_inference()
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _versions(tensors: list[Tensor]) -> tuple[Any, ...]:
    return tuple((id(t), -1 if t.is_inference() else t._version) for t in tensors)
