"""A matrix given by its Cholesky factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import check_field, check_positive_definite, cholesky

CholeskyT = TypeVar("CholeskyT", bound="Cholesky")


@dataclass(frozen=True, eq=False, repr=False)
class Cholesky(Operator):
    """`A = L L^T` by its factor; `S = L^-T`.

    Its `Inverse` is the precision of a Normal whose covariance has the factor `L`.

    Args:
        lower: `L`, `(P, P)`; elements above its diagonal are ignored.

    Raises:
        ValueError: it is not square, or not finite.

    Example:
        >>> Cholesky(torch.tensor([[2.0, 0.0], [1.0, 1.0]])).to_dense()
        tensor([[4., 2.],
                [2., 2.]])
    """

    lower: Tensor

    def __post_init__(self) -> None:
        size = self.lower.shape[-1] if self.lower.dim() else None
        check_field(self.lower, "the Cholesky factor", size, size)
        object.__setattr__(self, "lower", self.lower.tril())

    @property
    def size(self) -> int:
        return self.lower.shape[0]

    @factorization
    def _positive(self) -> Tensor:
        diagonal = self.lower.diagonal()
        check_positive_definite(diagonal.abs(), "the product of Cholesky factors")
        return self.lower

    def _matmul(self, x: Tensor) -> Tensor:
        return (x @ self.lower) @ self.lower.mT

    def _quadratic(self, x: Tensor) -> Tensor:
        return (x @ self.lower).square().sum(-1)

    def diagonal(self) -> Tensor:
        return self.lower.square().sum(-1)

    def to_dense(self) -> Tensor:
        return self.lower @ self.lower.mT

    def logdet(self) -> Tensor:
        return 2 * self._positive.diagonal().abs().log().sum()

    def inverse_diagonal(self) -> Tensor:
        identity = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return torch.linalg.solve_triangular(self._positive, identity, upper=False).square().sum(0)

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return solve_rows(self._positive, z, upper=False)

    def _whiten(self, x: Tensor) -> Tensor:
        return solve_rows(self._positive.mT, x, upper=True)

    def _scaled(self: CholeskyT, c: Tensor) -> CholeskyT:
        return self._like(lower=c.sqrt() * self.lower)

    def _add_diagonal(self: CholeskyT, d: Tensor) -> CholeskyT:
        total = self.to_dense() + d.expand(self.size).diag_embed()
        return self._like(lower=cholesky(total, "the sum with a diagonal"))


def solve_rows(triangle: Tensor, x: Tensor, upper: bool) -> Tensor:
    """Return `x T^-1` for row vectors `x`, with all batch dimensions as rows of one matrix."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.linalg.solve_triangular(triangle, rows, upper=upper, left=False).reshape(x.shape)
