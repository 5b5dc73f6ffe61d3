"""What a compiled program depends on besides tensors, to notice changes."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
    types.BuiltinFunctionType,
    types.ModuleType,
)
# Of objects of this package: past fits, and what is made anew of what a program is given.
_OF_FITS = {"optimizer", "_scheduler", "_pending", "_epochs_done", "_stage", "_chosen_prior"}
_OF_FITS |= {"_mean_weight"}
_LEFT_OUT = {*_OF_FITS, "_runtime", "prior", "terms", "_built"}


class _Same:
    """An object that is equal to itself alone, in the state that a version tells."""

    def __init__(self, one: Any, version: int = 0) -> None:
        self.one, self.version = one, version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return self.one is other.one and self.version == other.version

    def __hash__(self) -> int:
        return id(self.one)


def fingerprint(objective: Any, handlers: Iterable[Messenger], autocast: torch.dtype | None) -> Any:
    """Return what a program of an objective depends on besides the tensors that it is given.

    These are parameters and buffers, of which it has shapes, types and where two are one. Of other
    tensors it has the object and its version.
    """
    given = {id(t) for t in (*objective.parameters(), *objective.buffers())}
    described = _Description(given)
    return (
        described(objective),
        [described(configuration(handler)) for handler in handlers],
        autocast,
        described(dict(global_hooks._global_forward_hooks)),
        described(dict(global_hooks._global_forward_pre_hooks)),
    )


def configuration(handler: Messenger) -> Any:
    """Return what the answers of a handler depend on: all that it holds, or what it says itself."""
    own = getattr(handler, "configuration", None)
    return (type(handler), vars(handler) if own is None else own)


class _Description:
    """Describes objects by plain values that can be compared, each object once."""

    def __init__(self, given: set[int]) -> None:
        self._given = given
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []  # or others could have their ids

    def __call__(self, one: Any) -> Any:
        if isinstance(one, _PLAIN):
            return (type(one).__name__, one)
        if id(one) in self._known:
            return ("known", self._known[id(one)])
        self._known[id(one)] = len(self._known)
        self._kept.append(one)
        return self._of(one)

    def _of(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            return self._of_tensor(one)
        if isinstance(one, Mapping):
            return (type(one), [(self(key), self(value)) for key, value in one.items()])
        if isinstance(one, list | tuple | set | frozenset):
            return (type(one), [self(item) for item in one])
        if isinstance(one, types.MethodType):
            return (_Same(one.__func__), self(one.__self__))
        if isinstance(one, types.FunctionType):
            cells = [self(_content_of(cell)) for cell in one.__closure__ or ()]
            return (_Same(one), cells, self(one.__defaults__), self(one.__kwdefaults__))
        if isinstance(one, functools.partial):
            return (type(one), self(one.func), self(one.args), self(one.keywords))
        if isinstance(one, np.ndarray):
            return (type(one), one.shape, one.dtype, one.tobytes())
        held = _attributes_of(one)
        if not held and not isinstance(one, nn.Module):
            return _Same(one)
        if type(one).__module__.partition(".")[0] == "tyxe":
            held = {name: value for name, value in held.items() if name not in _LEFT_OUT}
        return (type(one), [(name, self(value)) for name, value in held.items()])

    def _of_tensor(self, tensor: Tensor) -> Any:
        kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        if id(tensor) in self._given:
            return kind
        return (*kind, _Same(tensor, 0 if tensor.is_inference() else tensor._version))


def _attributes_of(one: Any) -> dict[str, Any]:
    """Return an object's attributes: its own, and plain ones of its class if that is a user's."""
    own = type(one).__mro__
    kinds = [k for k in reversed(own) if k.__module__.partition(".")[0] not in _LIBRARIES]
    found = {n: v for kind in kinds for n, v in vars(kind).items() if type(v) in _NUMBERS}
    slots = [name for kind in own for name in _slots_of(kind) if hasattr(one, name)]
    return found | {name: getattr(one, name) for name in slots} | getattr(one, "__dict__", {})


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


_LIBRARIES = {"builtins", "torch", "pyro", "tyxe", "collections", "abc", "typing"}
_NUMBERS = (bool, int, float, complex, str)


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None
