"""Sites as one vector: in which order their weights lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Size, Tensor

__all__ = [
    "Group",
    "LinearGroup",
    "PlainGroup",
    "group_from_state",
    "group_state",
    "joined",
    "separated",
]


class Group(Protocol):
    """Some sites as one vector."""

    @property
    def name(self) -> str:
        """The name of the block."""

    @property
    def sites(self) -> list[str]:
        """The sites' names."""

    @property
    def size(self) -> int:
        """The number of weights."""

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector `(P,)` of the sites' values; a number stands for a constant site."""

    def to_values(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the sites' values `(..., *shape)` of vectors `(..., P)`."""


@dataclass(frozen=True)
class PlainGroup:
    """One site, flattened."""

    site: str
    shape: Size

    @property
    def name(self) -> str:
        """The site's name."""
        return self.site

    @property
    def sites(self) -> list[str]:
        """The site alone."""
        return [self.site]

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.shape.numel()

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Flatten."""
        return values[self.site].expand(self.shape).reshape(-1)

    def to_values(self, vector: Tensor) -> dict[str, Tensor]:
        """Give the shape back."""
        return {self.site: vector.reshape(vector.shape[:-1] + self.shape)}


@dataclass(frozen=True)
class LinearGroup:
    """Weight and bias of a linear map as matrices `(groups, outputs, fan_in [+ 1])`, row by row.

    The bias is the last column. Either of the two may be missing.

    Attributes:
        weight: the weight's site.
        bias: the bias' site.
        weight_shape: of the map's weight, also where it is no site.
        groups: of a grouped convolution.
        is_transposed: the weight's first dimension counts inputs.
    """

    weight: str | None
    bias: str | None
    weight_shape: Size
    groups: int
    is_transposed: bool

    @property
    def name(self) -> str:
        """The weight's name, or the bias'."""
        name = self.weight or self.bias
        assert name is not None
        return name

    @property
    def sites(self) -> list[str]:
        """Those of weight and bias that are there."""
        return [name for name in (self.weight, self.bias) if name is not None]

    @property
    def outputs(self) -> int:
        """Number of outputs of each of the groups."""
        return self.weight_shape[1] if self.is_transposed else self.weight_shape[0] // self.groups

    @property
    def fan_in(self) -> int:
        """Number of columns of the weight's matrices."""
        return self.weight_shape.numel() // (self.groups * self.outputs)

    @property
    def columns(self) -> int:
        """Number of columns with that of the bias, of what is a site."""
        return (self.fan_in if self.weight is not None else 0) + (self.bias is not None)

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.groups * self.outputs * self.columns

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Lay the matrices out."""
        parts = []
        if self.weight is not None:
            parts.append(self._matrices(values[self.weight].expand(self.weight_shape)))
        if self.bias is not None:
            bias = values[self.bias].expand(self.groups * self.outputs)
            parts.append(bias.reshape(self.groups, self.outputs, 1))
        return torch.cat(parts, -1).reshape(-1)

    def to_values(self, vector: Tensor) -> dict[str, Tensor]:
        """Give the shapes back."""
        matrices = vector.unflatten(-1, (self.groups, self.outputs, self.columns))
        values = {}
        if self.weight is not None:
            values[self.weight] = self._weight(matrices[..., : self.fan_in])
        if self.bias is not None:
            values[self.bias] = matrices[..., -1].flatten(-2)
        return values

    def _matrices(self, weight: Tensor) -> Tensor:
        if self.is_transposed:
            weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return weight.reshape(self.groups, self.outputs, self.fan_in)

    def _weight(self, matrices: Tensor) -> Tensor:
        batch = matrices.shape[:-3]
        if self.is_transposed:
            inputs = self.weight_shape[0] // self.groups
            split = matrices.unflatten(-1, (inputs, *self.weight_shape[2:]))
            matrices = split.transpose(len(batch) + 1, len(batch) + 2)
        return matrices.reshape(batch + self.weight_shape)


def joined(groups: Iterable[Group], values: Mapping[str, Tensor]) -> Tensor:
    """Return the vector `(P,)` of all groups."""
    return torch.cat([group.to_vector(values) for group in groups])


def separated(groups: Iterable[Group], vector: Tensor) -> dict[str, Tensor]:
    """Return the values `(..., *shape)` of all sites of vectors `(..., P)`."""
    groups = list(groups)
    parts = vector.split([group.size for group in groups], -1)
    return {
        site: value
        for group, part in zip(groups, parts, strict=True)
        for site, value in group.to_values(part).items()
    }


def group_state(group: Group) -> dict[str, Any]:
    """Return a group as plain values, of which `group_from_state` makes it again."""
    if isinstance(group, LinearGroup):
        return {
            "weight": group.weight,
            "bias": group.bias,
            "weight_shape": list(group.weight_shape),
            "groups": group.groups,
            "is_transposed": group.is_transposed,
        }
    assert isinstance(group, PlainGroup)
    return {"site": group.site, "shape": list(group.shape)}


def group_from_state(state: Mapping[str, Any]) -> Group:
    """Return the group of a state."""
    if "site" in state:
        return PlainGroup(state["site"], Size(state["shape"]))
    return LinearGroup(**{**state, "weight_shape": Size(state["weight_shape"])})
