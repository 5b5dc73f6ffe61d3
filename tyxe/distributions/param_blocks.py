"""The layout of sites in one vector, block by block."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Size, Tensor

from tyxe import check
from tyxe.linalg import BlockDiagonal, Diagonal


@dataclass(frozen=True)
class SiteBlock:
    """One site, row by row."""

    site: str
    shape: Size

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.site

    @property
    def sites(self) -> list[str]:
        """The sites' names."""
        return [self.site]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector `(P,)` of the sites' values; a number stands for a constant site."""
        value = values[self.site]
        return (value if value.shape == self.shape else value.expand(self.shape)).reshape(-1)

    def to_values(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the sites' values `(..., *shape)` of vectors `(..., P)`."""
        if vector.dim() == len(self.shape) == 1:  # without a node of the graph for a view
            return {self.site: vector}
        return {self.site: vector.reshape(vector.shape[:-1] + self.shape)}


class Arrangement(NamedTuple):
    """A map's weight that has the elements of a site as `site.reshape(sizes).permute(order)`."""

    site: Size
    sizes: Size
    order: tuple[int, ...]

    @classmethod
    def of(cls, view: Tensor, site: Size) -> Arrangement | None:
        """Return that of a view of a contiguous tensor, or None if it does not have all of it."""
        dims = [dim for dim in zip(view.stride(), view.shape, strict=True) if dim[1] != 1]
        outer = sorted(dims, reverse=True)
        sizes = Size(size for _, size in outer)
        steps = torch.empty(sizes, device="meta").stride()
        is_all = sizes.numel() == site.numel() and [*steps] == [step for step, _ in outer]
        return cls(site, sizes, Size(outer.index(dim) for dim in dims)) if is_all else None

    def of_site(self, value: Tensor) -> Tensor:
        return value.expand(self.site).reshape(self.sizes).permute(self.order)

    def to_site(self, weights: Tensor, batch: Size) -> Tensor:
        split = weights.reshape(batch + Size(self.sizes[dim] for dim in self.order))
        places = [len(batch) + dim for dim in self.order]
        return split.movedim([*range(len(batch), split.dim())], places).reshape(batch + self.site)


@dataclass(frozen=True)
class LinearBlock:
    """Weight and bias of a linear map as matrices `(groups, outputs, fan_in [+ 1])`, row by row.

    The bias is the last column. Either of the two may be missing; `weight_shape` is that of the
    map's weight, also if it is no site. `is_transposed` means that its first dimension counts
    inputs. `arrangement` is for a weight that is a rearranged site, and not transposed.
    """

    weight: str | None
    bias: str | None
    weight_shape: Size
    groups: int = 1
    is_transposed: bool = False
    arrangement: Arrangement | None = None

    @property
    def name(self) -> str:
        """The weight's name, or the bias' where there is no weight."""
        name = self.weight or self.bias
        assert name is not None
        return name

    @property
    def sites(self) -> list[str]:
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
        """Number of columns of the matrices: of the weight, if it is a site, and of the bias."""
        return (self.fan_in if self.weight is not None else 0) + (self.bias is not None)

    @property
    def size(self) -> int:
        return self.groups * self.outputs * self.columns

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        parts = []
        if self.weight is not None:
            value, arranged = values[self.weight], self.arrangement
            value = arranged.of_site(value) if arranged else value.expand(self.weight_shape)
            parts.append(self._matrices(value))
        if self.bias is not None:
            bias = values[self.bias].expand(self.groups * self.outputs)
            parts.append(bias.reshape(self.groups, self.outputs, 1))
        return torch.cat(parts, -1).reshape(-1)

    def to_values(self, vector: Tensor) -> dict[str, Tensor]:
        matrices = vector.unflatten(-1, (self.groups, self.outputs, self.columns))
        values = {}
        if self.weight is not None:
            values[self.weight] = self._weight(matrices[..., : self.fan_in])
        if self.bias is not None:
            values[self.bias] = matrices[..., -1].flatten(-2)
        return values

    def columns_of(self, site: str) -> slice:
        """Return the columns of the matrices that belong to a site."""
        return slice(0, self.fan_in) if site == self.weight else slice(self.columns - 1, None)

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
        if self.arrangement is not None:
            return self.arrangement.to_site(matrices, batch)
        return matrices.reshape(batch + self.weight_shape)


ParamBlock = SiteBlock | LinearBlock


@dataclass(frozen=True)
class ParamBlocks:
    """The layout of a net's sites in one vector: blocks, one after the other.

    Attributes:
        blocks: in the vector's order.

    Example:
        >>> blocks = ParamBlocks.of_sites({"weight": Size([2, 1]), "bias": Size([1])})
        >>> vector = blocks.flatten({"bias": torch.ones(1), "weight": torch.zeros(2, 1)})
        >>> vector
        tensor([0., 0., 1.])
        >>> blocks.unflatten(vector)["weight"].shape
        torch.Size([2, 1])
    """

    blocks: tuple[ParamBlock, ...]

    @classmethod
    def of_sites(cls, shapes: Mapping[str, Size]) -> ParamBlocks:
        """Return a layout with a block for each site, in the order of their shapes."""
        return cls(tuple(SiteBlock(site, shape) for site, shape in shapes.items()))

    def __iter__(self) -> Iterator[ParamBlock]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def names(self) -> list[str]:
        """The blocks' names."""
        return [block.name for block in self.blocks]

    @functools.cached_property
    def sites(self) -> list[str]:
        """The names of all sites."""
        return [site for block in self.blocks for site in block.sites]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The blocks' numbers of elements."""
        return [block.size for block in self.blocks]

    @property
    def size(self) -> int:
        """The number `P` of all elements."""
        return sum(self.sizes)

    @check.arguments
    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector `(P,)` of the sites' values; a number stands for a constant site."""
        return torch.cat([block.to_vector(values) for block in self.blocks])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the sites' values `(..., *shape)` of vectors `(..., P)`."""
        check.one_of("vector", vector, Tensor, "a tensor (..., P)")
        check.shape("vector", vector, (*vector.shape[:-1], self.size), ", of all sites' elements")
        parts = vector.split_with_sizes(self.sizes, -1)
        return {
            site: value
            for block, part in zip(self.blocks, parts, strict=True)
            for site, value in block.to_values(part).items()
        }

    def diagonal(self, vector: Tensor) -> BlockDiagonal:
        """Return the matrix with a vector `(P,)` on its diagonal, as blocks."""
        parts = zip(self.names, vector.split(self.sizes), strict=True)
        return BlockDiagonal({name: Diagonal(part) for name, part in parts})
