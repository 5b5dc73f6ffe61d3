"""A matrix without structure, given by its elements or by its Cholesky factor."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe.linalg.base import Operator, factorization
from tyxe.linalg.checks import check_positive_definite, check_square, check_symmetric, cholesky


class _Factorized(Operator):
    """The inverse of `A = L L^T`; `S = L^-T`."""

    @property
    @abstractmethod
    def _lower(self) -> Tensor:
        """`L`, whose diagonal has no zero."""

    def logdet(self) -> Tensor:
        return 2 * self._lower.diagonal().abs().log().sum()

    def inverse_diagonal(self) -> Tensor:
        return torch.cholesky_inverse(self._lower).diagonal()

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return _solve_rows(self._lower, z, upper=False)

    def _whiten(self, x: Tensor) -> Tensor:
        return _solve_rows(self._lower.mT, x, upper=True)


def _solve_rows(triangle: Tensor, x: Tensor, upper: bool) -> Tensor:
    """Return `x T^-1` for row vectors `x`, with all batch dimensions as rows of one matrix."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.linalg.solve_triangular(triangle, rows, upper=upper, left=False).reshape(x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Dense(_Factorized):
    """A matrix and, where it is needed, its Cholesky factor `A = L L^T`; `S = L^-T`.

    Every change of scale or diagonal costs a new factorisation. For many matrices `c A + tau I`,
    `Kronecker.from_factors(torch.ones(1, 1), A)` is cheaper: it has the same matrix by its
    eigenvectors, which all of them share.

    Args:
        matrix: `(P, P)`, symmetric positive semi-definite.

    Raises:
        ValueError: it is not square, not finite, or not symmetric.

    Example:
        >>> Dense(torch.tensor([[2.0, 0.0], [0.0, 8.0]])).inverse_diagonal()
        tensor([0.5000, 0.1250])
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        check_symmetric(self.matrix, "the matrix")

    @property
    def size(self) -> int:
        return self.matrix.shape[0]

    @factorization
    def _lower(self) -> Tensor:
        return cholesky(self.matrix, "the matrix")

    def _matmul(self, x: Tensor) -> Tensor:
        return x @ self.matrix

    def _quadratic(self, x: Tensor) -> Tensor:
        return (x * (x @ self.matrix)).sum(-1)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def to_dense(self) -> Tensor:
        return self.matrix

    @factorization
    def _inverse_root(self) -> Tensor:
        return self._whiten(self._identity()).contiguous()

    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        if a.shape[-2] != 1:
            return super().inverse_quadratic_factored(a, g)
        # The root is multiplied by `a` before `g`.
        rows, columns = g.shape[-1], a.shape[-1]
        root = self._inverse_root.unflatten(0, (rows, columns))
        by_output = (a.reshape(-1, columns) @ root).transpose(0, 1)
        white = g.squeeze(-2) @ by_output.reshape(*a.shape[:-2], rows, self.size)
        return white @ white.mT

    def _scaled(self, c: Tensor) -> Dense:
        return self._like(matrix=c * self.matrix)

    def _add_diagonal(self, d: Tensor) -> Dense:
        total = self.matrix.diagonal() + d
        return self._like(matrix=self.matrix.diagonal_scatter(total))


@dataclass(frozen=True, eq=False, repr=False)
class Cholesky(_Factorized):
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
        object.__setattr__(self, "lower", check_square(self.lower, "the Cholesky factor").tril())

    @property
    def size(self) -> int:
        return self.lower.shape[0]

    @factorization
    def _lower(self) -> Tensor:
        check_positive_definite(self.lower.diagonal().abs(), "the product of Cholesky factors")
        return self.lower

    def _matmul(self, x: Tensor) -> Tensor:
        return (x @ self.lower) @ self.lower.mT

    def _quadratic(self, x: Tensor) -> Tensor:
        return (x @ self.lower).square().sum(-1)

    def diagonal(self) -> Tensor:
        return self.lower.square().sum(-1)

    def to_dense(self) -> Tensor:
        return self.lower @ self.lower.mT

    def _scaled(self, c: Tensor) -> Cholesky:
        return self._like(lower=c.sqrt() * self.lower)

    def _add_diagonal(self, d: Tensor) -> Cholesky:
        total = self.to_dense() + d.expand(self.size).diag_embed()
        return self._like(lower=cholesky(total, "the sum with a diagonal"))
