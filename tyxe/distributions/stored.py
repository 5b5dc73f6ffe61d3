"""A distribution held by a module, so that it moves, saves and loads with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributions as td
from torch import Size, Tensor, nn

from tyxe.distributions.joint import JointDistribution
from tyxe.distributions.joint_normal import GaussianJoint
from tyxe.distributions.joint_outline import joint_outline
from tyxe.linalg import Operator

__all__ = ["StoredDistribution", "detached", "unexpanded"]

_CONTAINERS = (td.Distribution, td.Transform, Operator)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Operator):
        # Nor is what an operator has computed.
        yield from value._fields().items()
    elif isinstance(value, _CONTAINERS):
        # A transform's cache and its weak link to its inverse are no part of it.
        yield from ((k, v) for k, v in vars(value).items() if k not in ("_cached_x_y", "_inv"))
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _map_tensors(function: Callable[[str, Tensor], Tensor], value: Any) -> Any:
    """Copy a distribution, with each tensor replaced by the function of its path and itself."""
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
        if type(value) in (list, tuple):
            items = [visit(child, f"{path}__{i}".lstrip("_")) for i, child in _children(value)]
            return type(value)(items)
        if type(value) is dict:
            # By number: names of sites have dots, and buffers may not.
            keyed = enumerate(value.items())
            return {k: visit(child, f"{path}__{i}".lstrip("_")) for i, (k, child) in keyed}
        return value

    return visit(value, "")


def detached(distribution: td.Distribution) -> td.Distribution:
    """Copy a distribution without gradients or shared storage.

    Example:
        >>> import torch
        >>> loc = nn.Parameter(torch.zeros(2))
        >>> detached(td.Normal(loc, 1.0)).loc.requires_grad
        False
    """
    copied = _map_tensors(lambda _, tensor: tensor.detach().clone(), distribution)
    # What is left is no tensor of the distribution itself, such as the modules of a flow.
    return copy.deepcopy(copied)


def unexpanded(tensor: Tensor) -> Tensor:
    """Drop the copies of an expanded tensor: a standard normal over a layer is two numbers.

    Example:
        >>> import torch
        >>> unexpanded(torch.zeros(1, 2).expand(3, 2)).shape
        torch.Size([1, 2])
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _fits(loaded: Size, shape: Size) -> bool:
    return len(loaded) == len(shape) and all(
        a in (1, b) for a, b in zip(loaded, shape, strict=True)
    )


def _describe(value: Any) -> str:
    """The kind of a distribution, down to the structures of its operators."""
    name = type(value).__name__
    if isinstance(value, td.Independent):
        return f"{name}({_describe(value.base_dist)})"
    inside = [
        _describe(part)
        for part in _members(value)
        if isinstance(part, Operator | JointDistribution)
    ]
    return f"{name}({', '.join(inside)})" if inside else name


def _members(value: Any) -> Iterator[Any]:
    """What a distribution or operator is made of, lists and mappings opened."""
    for _, child in _children(value):
        if type(child) in (list, tuple):
            yield from child
        elif type(child) is dict:
            yield from child.values()
        else:
            yield child


class StoredDistribution(nn.Module):
    """Keep a distribution's tensors as buffers of a module.

    Expanded tensors are kept at their real size. A state dict whose tensors broadcast to the
    distribution's shape is taken whatever their sizes, so that a prior which became a posterior
    (one number for each weight) loads into a fresh object (one number for all).

    Args:
        distribution: any `torch.distributions` or Pyro distribution.
        like: a tensor whose dtype and device the distribution's floating-point tensors take.

    Example:
        >>> import torch
        >>> stored = StoredDistribution(td.Normal(torch.zeros(()), torch.ones(())).expand([3, 2]))
        >>> stored.double().distribution.loc.dtype, stored.distribution.loc.shape
        (torch.float64, torch.Size([3, 2]))
    """

    def __init__(self, distribution: td.Distribution, like: Tensor | None = None) -> None:
        super().__init__()
        self._shapes: dict[str, Size] = {}

        def keep(path: str, tensor: Tensor) -> Tensor:
            self._shapes[path] = tensor.shape
            self.register_buffer(path, unexpanded(tensor).detach().clone())
            return tensor.new_zeros(())

        self._template = _map_tensors(keep, distribution)
        self._kind = _describe(distribution)
        self._built: td.Distribution | None = None
        if like is not None:
            self.to(dtype=like.dtype, device=like.device)

    @property
    def distribution(self) -> td.Distribution:
        """The distribution on the module's present device and dtype."""
        if self._built is None:
            self._built = _map_tensors(
                lambda path, _: self._buffers[path].expand(self._shapes[path]),  # type: ignore[union-attr]
                self._template,
            )
        return self._built

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StoredDistribution:
        self._built = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    def get_extra_state(self) -> str | dict[str, Any]:
        """Name the kind of distribution, so that loading into another kind is an error.

        A Gaussian over several sites is outlined besides, so that it can be made anew.
        """
        if isinstance(self._template, GaussianJoint):
            return {"kind": self._kind, "outline": joint_outline(self.distribution)}  # type: ignore[arg-type]
        return self._kind

    def set_extra_state(self, state: str | dict[str, Any]) -> None:
        """Accept the kind that `_load_from_state_dict` has compared."""

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
        extra = state_dict.get(prefix + "_extra_state", self._kind)
        kind = extra["kind"] if isinstance(extra, dict) else extra
        if kind != self._kind:
            error_msgs.append(
                f"{prefix.rstrip('.')} is {self._kind} here and {kind} in the state dict: "
                "call update_prior with that kind of prior first"
            )
            return
        for path, shape in self._shapes.items():
            loaded, own = state_dict.get(prefix + path), self._buffers[path]
            if loaded is not None and own is not None and _fits(loaded.shape, shape):
                self._buffers[path] = own.new_empty(loaded.shape)
        self._built = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
