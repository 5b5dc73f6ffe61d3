"""A matrix without structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import check_symmetric, cholesky
from tyxe.linalg.triangular import solve_rows

DenseT = TypeVar("DenseT", bound="Dense")


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Operator):
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

    def logdet(self) -> Tensor:
        return 2 * self._lower.diagonal().log().sum()

    def inverse_diagonal(self) -> Tensor:
        return torch.cholesky_inverse(self._lower).diagonal()

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return solve_rows(self._lower, z, upper=False)

    def _whiten(self, x: Tensor) -> Tensor:
        return solve_rows(self._lower.mT, x, upper=True)

    @factorization
    def _inverse_root(self) -> Tensor:
        identity = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return self._whiten(identity)

    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        """Return `inverse_quadratic` of the rows `J_c = vec(g_c a^T)`, without forming them.

        The root `S` is computed once, and multiplied by `a` before `g`.

        Args:
            a: inputs of the map, `(..., in)`.
            g: gradients of `C` outputs of the net in the map's output, `(..., C, out)`.

        Returns:
            `(..., C, C)`.

        Example:
            >>> precision = Dense(torch.eye(6)).add_diagonal(1.0)
            >>> a, g = torch.rand(5, 3), torch.rand(5, 4, 2)
            >>> rows = (g.unsqueeze(-1) * a[:, None, None]).flatten(-2)
            >>> torch.allclose(precision.inverse_quadratic_factored(a, g),
            ...                precision.inverse_quadratic(rows))
            True
        """
        rows, columns = g.shape[-1], a.shape[-1]
        if g.dim() < 2 or rows * columns != self.size:
            raise ValueError(
                f"inputs {tuple(a.shape)} and gradients {tuple(g.shape)} do not make rows of "
                f"{self.size} elements"
            )
        by_output = a.reshape(-1, columns) @ self._inverse_root.unflatten(0, (rows, columns))
        white = g @ by_output.transpose(0, 1).reshape(*a.shape[:-1], rows, self.size)
        return white @ white.mT

    def _scaled(self: DenseT, c: Tensor) -> DenseT:
        return self._like(matrix=c * self.matrix)

    def _add_diagonal(self: DenseT, d: Tensor) -> DenseT:
        total = self.matrix.diagonal() + d
        return self._like(matrix=self.matrix.diagonal_scatter(total))
