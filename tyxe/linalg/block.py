"""A block-diagonal matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.checks import check_same_kind

BlockDiagonalT = TypeVar("BlockDiagonalT", bound="BlockDiagonal")


@dataclass(frozen=True, eq=False, repr=False)
class BlockDiagonal(Operator):
    """Named blocks over the parts of one vector, in their order; `S` has the blocks' roots.

    Args:
        blocks: at least one operator, by name; blocks may be block-diagonal themselves.

    Raises:
        ValueError: there is no block, or two differ in type or device. Errors of a block's methods
            have the block's name in their message.

    Example:
        >>> from tyxe.linalg import Dense, Diagonal
        >>> precision = BlockDiagonal({
        ...     "weight": Dense(3 * torch.eye(2)), "bias": Diagonal(torch.full((1,), 3.0))
        ... }).add_diagonal(1.0)
        >>> precision.solve(torch.tensor([4.0, 8.0, 12.0]))
        tensor([1., 2., 3.])
        >>> precision.split(torch.arange(3))
        {'weight': tensor([0, 1]), 'bias': tensor([2])}
    """

    blocks: Mapping[str, Operator]

    def __post_init__(self) -> None:
        # A copy, because the caller may change the mapping.
        object.__setattr__(self, "blocks", dict(self.blocks))
        if not self.blocks:
            raise ValueError("a block-diagonal operator has at least one block")
        first = next(iter(self.blocks))
        for name, block in self.blocks.items():
            check_same_kind(self.blocks[first], block, f"the blocks {first!r} and {name!r}")

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each block."""
        return {name: block.size for name, block in self.blocks.items()}

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Return the blocks' parts of vectors `(..., P)`, of any type, by name."""
        if x.shape[-1:] != (self.size,):
            raise ValueError(
                f"blocks of {self.size} elements in all cannot split a tensor of shape "
                f"{tuple(x.shape)}"
            )
        return dict(zip(self.blocks, x.split(list(self.sizes.values()), -1), strict=True))

    def cat(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return vectors `(..., P)` from their parts by name, the inverse of `split`.

        Example:
            >>> from tyxe.linalg import Diagonal
            >>> blocks = BlockDiagonal({"a": Diagonal(torch.ones(1)), "b": Diagonal(torch.ones(2))})
            >>> blocks.cat({"b": torch.zeros(2), "a": torch.ones(1)})
            tensor([1., 0., 0.])
        """
        given = {name: part.shape[-1:].numel() for name, part in parts.items()}
        if given != self.sizes:
            raise ValueError(f"expected parts of sizes {self.sizes}, got {given}")
        return torch.cat([parts[name] for name in self.blocks], -1)

    def add_diagonals(
        self: BlockDiagonalT, diagonals: Mapping[str, float | Tensor]
    ) -> BlockDiagonalT:
        """Return the operator with a diagonal added to each block, such as a precision per layer.

        Args:
            diagonals: a number or a diagonal for every block.

        Raises:
            ValueError: the names are not those of the blocks.

        Example:
            >>> from tyxe.linalg import Diagonal
            >>> blocks = BlockDiagonal({"a": Diagonal(torch.ones(1)), "b": Diagonal(torch.ones(2))})
            >>> blocks.add_diagonals({"a": 1.0, "b": 2.0}).diagonal()
            tensor([2., 3., 3.])
        """
        if set(diagonals) != set(self.blocks):
            raise ValueError(
                f"expected a diagonal for each of {list(self.blocks)}, got {list(diagonals)}"
            )
        added = self._each(lambda block, d: block.add_diagonal(d), diagonals)
        return self._like(blocks=added)

    def _matmul(self, x: Tensor) -> Tensor:
        return self.cat(self._each(lambda block, part: block.matmul(part), self.split(x)))

    def _quadratic(self, x: Tensor) -> Tensor:
        terms = self._each(lambda block, part: block.quadratic(part), self.split(x))
        return torch.stack(list(terms.values())).sum(0)

    def diagonal(self) -> Tensor:
        return self.cat(self._each(lambda block: block.diagonal()))

    def to_dense(self) -> Tensor:
        return torch.block_diag(*self._each(lambda block: block.to_dense()).values())

    def logdet(self) -> Tensor:
        return torch.stack(list(self._each(lambda block: block.logdet()).values())).sum()

    def inverse_diagonal(self) -> Tensor:
        return self.cat(self._each(lambda block: block.inverse_diagonal()))

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return self.cat(self._each(lambda block, part: block.inverse_sqrt(part), self.split(z)))

    def _whiten(self, x: Tensor) -> Tensor:
        return self.cat(self._each(lambda block, part: block.whiten(part), self.split(x)))

    def _scaled(self: BlockDiagonalT, c: Tensor) -> BlockDiagonalT:
        return self._like(blocks=self._each(lambda block: block.scaled(c)))

    def _add_diagonal(self: BlockDiagonalT, d: Tensor) -> BlockDiagonalT:
        return self.add_diagonals(self.split(d) if d.dim() else dict.fromkeys(self.blocks, d))

    def _each(self, function: Callable[..., Any], *arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function with every block and its arguments, and return the results by name."""
        results = {}
        for name, block in self.blocks.items():
            try:
                results[name] = function(block, *(argument[name] for argument in arguments))
            except ValueError as error:
                raise ValueError(f"block {name!r}: {error}") from error
        return results
