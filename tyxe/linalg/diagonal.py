"""A diagonal matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import check_field, check_non_negative, check_positive_definite

DiagonalT = TypeVar("DiagonalT", bound="Diagonal")


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Operator):
    """A diagonal matrix; `S = A^-1/2`.

    Args:
        entries: its diagonal, `(P,)`, not negative.

    Raises:
        ValueError: it is no vector, not finite, or has negative elements.

    Example:
        >>> import torch
        >>> precision = Diagonal(torch.tensor([0.0, 3.0])).add_diagonal(1.0)
        >>> precision.inverse_diagonal()
        tensor([1.0000, 0.2500])
        >>> precision.logdet()
        tensor(1.3863)
    """

    entries: Tensor

    def __post_init__(self) -> None:
        check_non_negative(check_field(self.entries, "the diagonal", None), "the diagonal")

    @property
    def size(self) -> int:
        return self.entries.shape[0]

    @factorization
    def _positive(self) -> Tensor:
        return check_positive_definite(self.entries, "the diagonal matrix")

    @factorization
    def _root(self) -> Tensor:
        return self._positive.sqrt()

    def _matmul(self, x: Tensor) -> Tensor:
        return self.entries * x

    def _quadratic(self, x: Tensor) -> Tensor:
        return x.square() @ self.entries

    def diagonal(self) -> Tensor:
        return self.entries

    def to_dense(self) -> Tensor:
        return self.entries.diag_embed()

    def logdet(self) -> Tensor:
        return self._positive.log().sum()

    def inverse_diagonal(self) -> Tensor:
        return self._positive.reciprocal()

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return z / self._root

    def _whiten(self, x: Tensor) -> Tensor:
        return x / self._root

    def _scaled(self: DiagonalT, c: Tensor) -> DiagonalT:
        return self._like(entries=c * self.entries)

    def _add_diagonal(self: DiagonalT, d: Tensor) -> DiagonalT:
        return self._like(entries=self.entries + d)
