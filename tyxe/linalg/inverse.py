"""The inverse of an operator, as an operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import check_small
from tyxe.linalg.dense import Dense
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.triangular import Cholesky

InverseT = TypeVar("InverseT", bound="Inverse")

# `(z, transposed)` to `R z` or `R^T z`.
Root = Callable[[Tensor, bool], Tensor]


@functools.singledispatch
def root(operator: Operator) -> Root:
    """Return products with a root `R` of an operator `A = R R^T`, positive definite.

    Register a structure that has one. All others take `R = A S`, since `S S^T = A^-1`. The result
    is a function of vectors `(..., P)` and of whether to multiply by the transpose.
    """

    def multiply(z: Tensor, transposed: bool) -> Tensor:
        if transposed:
            return operator.whiten(operator.matmul(z))
        return operator.matmul(operator.inverse_sqrt(z))

    return multiply


@root.register
def _(operator: Cholesky) -> Root:
    return lambda z, transposed: z @ (operator.lower if transposed else operator.lower.mT)


@dataclass(frozen=True, eq=False, repr=False)
class Inverse(Operator):
    """`A = B^-1`: the precision of a Normal with a known covariance `B`.

    Every method calls the opposite one of `B`; `S` is a root of `B`. Adding a diagonal takes a
    dense matrix, which has at most 4,096 rows.

    Args:
        operator: `B`, positive definite.

    Example:
        >>> from tyxe.linalg import LowRank
        >>> covariance = LowRank(torch.ones(2), torch.tensor([[2.0], [2.0]]))
        >>> Inverse(covariance).diagonal(), Inverse(covariance).inverse_diagonal()
        (tensor([0.5556, 0.5556]), tensor([5., 5.]))
    """

    operator: Operator

    @property
    def size(self) -> int:
        return self.operator.size

    @factorization
    def _diagonal(self) -> Tensor:
        return self.operator.inverse_diagonal()

    def _matmul(self, x: Tensor) -> Tensor:
        return self.operator.solve(x)

    def _quadratic(self, x: Tensor) -> Tensor:
        return self.operator.whiten(x).square().sum(-1)

    def diagonal(self) -> Tensor:
        return self._diagonal

    def to_dense(self) -> Tensor:
        white = self.operator.whiten(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return white @ white.mT

    def logdet(self) -> Tensor:
        return -self.operator.logdet()

    def inverse_diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def sample(self, sample_shape: Sequence[int] = (), noise: Tensor | None = None) -> Tensor:
        if noise is None and isinstance(self.operator, LowRank):
            return self.operator.draw(sample_shape)
        return super().sample(sample_shape, noise)

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return root(self.operator)(z, False)

    def _whiten(self, x: Tensor) -> Tensor:
        return root(self.operator)(x, True)

    def _scaled(self: InverseT, c: Tensor) -> InverseT:
        return self._like(operator=self.operator.scaled(c.reciprocal()))

    def _add_diagonal(self: InverseT, d: Tensor) -> InverseT:
        check_small("an inverse with a diagonal added", self.size, "keep them apart in a Sum")
        total = Dense(self.to_dense()).add_diagonal(d)
        return self._like(operator=Dense(Inverse(total).to_dense()))
