"""Groups of sites that share a block of the curvature, and the order of their weights in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Size, Tensor

from tyxe.curvature.uses import Use, patches

__all__ = ["Group", "LinearGroup", "PlainGroup", "find_groups", "joined", "separated"]


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
        """Return the sites' values of a vector `(P,)`."""


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
        return {self.site: vector.reshape(self.shape)}


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

    def inputs(self, use: Use, points: int) -> Tensor:
        """Return what multiplies the columns in a map, `(n, R, groups, columns)`: patches, a one.

        Args:
            use: one of the group's maps.
            points: number `n` of data points.
        """
        found = patches(use, points, self.bias is not None)
        return found[..., -1:] if self.weight is None else found

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
        matrices = vector.reshape(self.groups, self.outputs, self.columns)
        values = {}
        if self.weight is not None:
            values[self.weight] = self._weight(matrices[..., : self.fan_in])
        if self.bias is not None:
            values[self.bias] = matrices[..., -1].reshape(-1)
        return values

    def _matrices(self, weight: Tensor) -> Tensor:
        if self.is_transposed:
            weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return weight.reshape(self.groups, self.outputs, self.fan_in)

    def _weight(self, matrices: Tensor) -> Tensor:
        if not self.is_transposed:
            return matrices.reshape(self.weight_shape)
        kernel = self.weight_shape[2:]
        inputs = self.weight_shape[0] // self.groups
        split = matrices.reshape(self.groups, self.outputs, inputs, *kernel)
        return split.transpose(1, 2).reshape(self.weight_shape)


def find_groups(
    shapes: Mapping[str, Size], uses: Iterable[Use], elsewhere: Iterable[str]
) -> list[Group]:
    """Put sites into groups: weight and bias that enter the same linear maps, and single ones.

    Args:
        shapes: of all sites, in the order that the groups follow.
        uses: the linear maps of one forward.
        elsewhere: sites that something else uses, so that no factors exist.

    Returns:
        Groups that hold every site once.
    """
    candidates: dict[str, set[LinearGroup]] = {}
    for use in uses:
        whole = [site for site in (use.weight_site, use.bias_site) if site is not None]
        group = LinearGroup(
            use.weight_site, use.bias_site, use.event.weight.shape, use.groups, use.is_transposed
        )
        for site in use.sites:
            # A part of a site has no group: it cannot be told from what the site's rest does.
            candidates.setdefault(site, set()).update([group] if site in whole else [])
            if site not in whole:
                candidates[site].add(_part_of(site, shapes[site]))
    other = set(elsewhere)
    groups: dict[str, Group] = {}
    for site, shape in shapes.items():
        found = list(candidates.get(site, ()))
        chosen: Group = PlainGroup(site, shape)
        if len(found) == 1 and all(
            name not in other and candidates.get(name) == {found[0]} for name in found[0].sites
        ):
            chosen = found[0]
        groups.setdefault(chosen.name, chosen)
    return list(groups.values())


def _part_of(site: str, shape: Size) -> LinearGroup:
    """What no other site is in a group with."""
    return LinearGroup(f"a part of {site}", None, shape, 1, False)


def joined(groups: Iterable[Group], values: Mapping[str, Tensor]) -> Tensor:
    """Return the vector `(P,)` of all groups."""
    return torch.cat([group.to_vector(values) for group in groups])


def separated(groups: Iterable[Group], vector: Tensor) -> dict[str, Tensor]:
    """Return the values of all sites of a vector `(P,)`."""
    groups = list(groups)
    parts = vector.split([group.size for group in groups])
    return {
        site: value
        for group, part in zip(groups, parts, strict=True)
        for site, value in group.to_values(part).items()
    }
