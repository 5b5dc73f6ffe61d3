"""A distribution held by a module, so that it is moved, saved and loaded with it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor, nn

from tyxe.distributions.gaussian import Gaussian
from tyxe.files import as_bytes, of_bytes
from tyxe.linalg import Operator

# Where a template has its tensors: one for all, so that those of equal distributions are equal.
_PLACE = torch.zeros((), device="cpu")
_CONTAINERS = (td.Distribution, td.Transform, Operator)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what is inside a container, by attribute, number or key; nothing for others."""
    if isinstance(value, Operator):
        # Without the results that an operator has cached.
        yield from value._fields().items()
    elif isinstance(value, _CONTAINERS):
        # Without a transform's cache and its weak reference to its inverse.
        yield from ((k, v) for k, v in vars(value).items() if k not in ("_cached_x_y", "_inv"))
    elif type(value) in (list, tuple):
        yield from enumerate(value)
    elif type(value) is dict:
        yield from value.items()


def _map_tensors(function: Callable[[str, Tensor], Tensor], value: Any) -> Any:
    """Copy a distribution with each tensor replaced by `function(path, tensor)`."""
    # A transform and its inverse refer to each other.
    copies: dict[int, Any] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return function(path, value)
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, _CONTAINERS):
            copies[id(value)] = clone = copy.copy(value)
            for key, child in _children(value):
                clone.__dict__[key] = visit(child, f"{path}__{key}".lstrip("_"))
            return clone
        if type(value) not in (list, tuple, dict):
            return value
        # By number: names of sites have dots, which names of buffers may not have.
        found = {
            key: visit(child, f"{path}__{i}".lstrip("_"))
            for i, (key, child) in enumerate(_children(value))
        }
        return found if type(value) is dict else type(value)(found.values())

    return visit(value, "")


def detached(distribution: td.Distribution) -> td.Distribution:
    """Copy a distribution without gradients or shared storage."""
    copied = _map_tensors(lambda _, tensor: tensor.detach().clone(), distribution)
    # For parts that are no distributions, such as the modules of a flow.
    return copy.deepcopy(copied)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return an expanded tensor with size 1 in each dimension that repeats its elements."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _fits(loaded: Size, shape: Size) -> bool:
    return len(loaded) == len(shape) and all(
        a in (1, b) for a, b in zip(loaded, shape, strict=True)
    )


def _describe(value: Any) -> str:
    """Return the class of a distribution with those of the operators inside it."""
    name = type(value).__name__
    if isinstance(value, td.Independent):  # subclasses are of the same kind
        return f"Independent({_describe(value.base_dist)})"
    inside = [_describe(part) for part in _operators(value)]
    return f"{name}({', '.join(inside)})" if inside else name


def _operators(value: Any) -> Iterator[Operator]:
    """Yield the operators among what is inside a container, and in its lists and mappings."""
    for _, child in _children(value):
        if isinstance(child, Operator):
            yield child
        elif type(child) in (list, tuple, dict):
            yield from _operators(child)


# Names of a Gaussian's tensors in states that were written before 0.1, and now.
_FORMER = (
    (r"^loc$", "terms__0__0"),
    (r"^precision__", "terms__0__1__"),
    (r"^factors__(\d+)__loc$", r"terms__\1__0"),
    (r"^factors__(\d+)___precision__", r"terms__\1__1__"),
)


def _rename_former(state_dict: dict[str, Any], prefix: str) -> None:
    """Give a Gaussian's tensors in a state the names that they have now."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        for former, now in _FORMER:
            path, changed = re.subn(former, now, key.removeprefix(prefix))
            if changed:
                state_dict[prefix + path] = state_dict.pop(key)


class BufferedDistribution(nn.Module):
    """A distribution whose tensors are buffers, in the dtype and on the device of `like`.

    Expanded tensors are stored without their repetitions. A state dict loads if its tensors
    broadcast to the distribution's shape: one number per weight may replace one number for all.
    """

    def __init__(self, distribution: td.Distribution, like: Tensor | None = None) -> None:
        super().__init__()
        self._shapes: dict[str, Size] = {}

        def keep(path: str, tensor: Tensor) -> Tensor:
            self._shapes[path] = tensor.shape
            own = unexpanded(tensor).detach().clone(memory_format=torch.contiguous_format)
            self.register_buffer(path, own)
            return _PLACE

        self._template = _map_tensors(keep, distribution)
        self._kind = _describe(distribution)
        # Posteriors of Laplace approximations say which curvature they contain.
        self._absorbed: int | None = getattr(distribution, "absorbed", None)
        # What was built, and of which buffers.
        self._built: tuple[td.Distribution, dict[str, Any]] | None = None
        if like is not None:
            self.to(dtype=like.dtype, device=like.device)

    @property
    def distribution(self) -> td.Distribution:
        """The distribution on the module's present device and dtype."""
        if self._built is None or self._built[1] is not self._buffers:
            built: Any = _map_tensors(
                lambda path, _: self._buffers[path].expand(self._shapes[path]),  # type: ignore[union-attr]
                self._template,
            )
            if self._absorbed is not None or hasattr(built, "absorbed"):
                built.absorbed = self._absorbed
            self._built = built, self._buffers
        return self._built[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BufferedDistribution:
        self._built = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    def get_extra_state(self) -> Tensor:
        """Return the kind of distribution, and what is needed besides the numbers to rebuild it."""
        found: dict[str, Any] = {"kind": self._kind}
        if self._absorbed is not None:
            found["absorbed"] = self._absorbed
        if isinstance(self._template, Gaussian):
            found["outline"] = self.distribution.outline()  # type: ignore[attr-defined]
        return as_bytes(found if len(found) > 1 else self._kind)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: `_load_from_state_dict` has compared the kinds."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "_extra_state"
        extra = of_bytes(state_dict[key]) if key in state_dict else self._kind
        kind = extra["kind"] if isinstance(extra, dict) else extra
        if isinstance(extra, dict) and "outline" in extra:
            kind = _describe(Gaussian.from_outline(extra["outline"]))
            _rename_former(state_dict, prefix)
        if kind != self._kind:
            error_msgs.append(
                f"{prefix.rstrip('.')} is {self._kind} here and {kind} in the state dict: "
                "call update_prior with that kind of prior first"
            )
            return
        self._absorbed = extra.get("absorbed") if isinstance(extra, dict) else None
        for path, shape in self._shapes.items():
            loaded, own = state_dict.get(prefix + path), self._buffers[path]
            if loaded is not None and own is not None and _fits(loaded.shape, shape):
                self._buffers[path] = own.new_empty(loaded.shape)
        self._built = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
