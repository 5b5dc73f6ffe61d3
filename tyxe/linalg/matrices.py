"""Symmetric matrices given by their numbers: dense, diagonal, and low rank over a diagonal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tyxe.linalg.base import Operator, factorization
from tyxe.linalg.checks import (
    check_field,
    check_non_negative,
    check_positive_definite,
    check_square,
    check_symmetric,
    cholesky,
)


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


def pairs_are_fewer(positions: int, classes: int) -> bool:
    """Whether `variance_of_products` takes fewer products than the rows `sum_r g_cr a_r^T`."""
    return positions * (positions + 1) // 2 <= classes * (positions + classes)


def variance_of_products(a: Tensor, g: Tensor, variances: Tensor) -> Tensor:
    """Return `sum_oi J_coi J_c'oi v_oi` for `J_c = sum_r g_cr a_r^T`, `(..., C, C)`.

    It is `sum_rr'o g_cro g_c'r'o w_rr'o` with `w_rr'o = sum_i a_ri a_r'i v_oi`, so that no `J_c` is
    formed. `a` is `(..., R, in)`, `g` `(..., C, R, out)` and `variances` `(out, in)`.
    """
    positions = a.shape[-2]
    if positions == 1:
        # Without a square root, whose derivative is infinite at inputs of zero.
        per_output, g = a.square() @ variances.mT, g.squeeze(-2)
        return (g * per_output) @ g.mT
    first, second = torch.triu_indices(positions, positions, device=a.device)
    numbers = torch.arange(len(first), device=a.device)
    pair = numbers.new_empty(positions, positions)
    pair[first, second] = pair[second, first] = numbers
    weights = (a[..., first, :] * a[..., second, :]) @ variances.mT
    by_output = g.movedim(-1, -3)  # (..., out, C, R)
    weighted = by_output @ weights.mT[..., pair]
    rows, others = (x.transpose(-3, -2).flatten(-2) for x in (weighted, by_output))
    return rows @ others.mT


@dataclass(frozen=True, eq=False, repr=False)
class _WithEntries(Operator):
    """A matrix of which a diagonal, not negative, is a part."""

    entries: Tensor

    def __post_init__(self) -> None:
        check_non_negative(check_field(self.entries, "the diagonal", "P"), "the diagonal")

    @property
    def size(self) -> int:
        return self.entries.shape[0]

    @factorization
    def _positive(self) -> Tensor:
        return check_positive_definite(self.entries, "the diagonal matrix")

    @factorization
    def _root(self) -> Tensor:
        return self._positive.sqrt()

    def _add_diagonal(self, d: Tensor) -> Any:
        return self._like(entries=self.entries + d)


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(_WithEntries):
    """A diagonal matrix; `S = A^-1/2`.

    Args:
        entries: its diagonal, `(P,)`, not negative.

    Raises:
        ValueError: it is not a vector, not finite, or has negative elements.

    Example:
        >>> precision = Diagonal(torch.tensor([0.0, 3.0])).add_diagonal(1.0)
        >>> precision.inverse_diagonal()
        tensor([1.0000, 0.2500])
        >>> precision.logdet()
        tensor(1.3863)
    """

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

    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        # Pairs of positions may cancel, and variances of weights without curvature are large.
        if a.shape[-2] > 1:
            return super().inverse_quadratic_factored(a, g)
        return variance_of_products(a, g, self.inverse_diagonal().view(g.shape[-1], a.shape[-1]))

    def _scaled(self, c: Tensor) -> Diagonal:
        return self._like(entries=c * self.entries)


def low_rank_root(lower: Tensor) -> Tensor:
    """Return `K = L^-T (I + L)^-1`, with which `I - V K V^T` is a root of `(I + V V^T)^-1`.

    With `L L^T = I + V^T V` and `K = L^-T J`, the product of the root and its transpose is
    `I - V [K + K^T - K (L L^T - I) K^T] V^T`. The bracket is the `(L L^T)^-1` of Woodbury's
    formula if and only if `(I - J L) (I - J L)^T = J J^T`, which holds for `I - J L = J`.
    """
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(identity + lower, identity, upper=False)
    return torch.linalg.solve_triangular(lower.mT, inverse, upper=True)


@dataclass(frozen=True, eq=False, repr=False)
class LowRank(_WithEntries):
    """`A = D + U U^T`, in time `P R` for products and `P R^2 + R^3` once for the inverse.

    With `V = D^-1/2 U` the root is `S = D^-1/2 (I - V K V^T)`, where `L L^T = I + V^T V` and
    `K = L^-T (I + L)^-1`. `D` may have zeros where no inverse is needed.

    Args:
        entries: the diagonal of `D`, `(P,)`, not negative.
        factor: `U`, `(P, R)`.

    Raises:
        ValueError: shapes that do not fit, elements not finite, or a negative diagonal.

    Example:
        >>> precision = LowRank(torch.ones(2), torch.tensor([[2.0], [2.0]]))
        >>> precision.to_dense()
        tensor([[5., 4.],
                [4., 5.]])
        >>> precision.inverse_diagonal()
        tensor([0.5556, 0.5556])
        >>> precision.logdet()
        tensor(2.1972)
    """

    factor: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self.factor, "the factor", self.size, "R")

    @factorization
    def _v(self) -> Tensor:
        # Products with a part of a vector want its elements next to each other in memory.
        return (self.factor.mT.contiguous() / self._root).mT

    @factorization
    def _lower(self) -> Tensor:
        identity = torch.eye(self.factor.shape[1], dtype=self.dtype, device=self.device)
        capacitance = identity + self._v.mT @ self._v
        return cholesky(capacitance, "the low-rank part plus its diagonal")

    @factorization
    def _k(self) -> Tensor:
        return low_rank_root(self._lower)

    def _matmul(self, x: Tensor) -> Tensor:
        return self.entries * x + (x @ self.factor) @ self.factor.mT

    def _quadratic(self, x: Tensor) -> Tensor:
        return x.square() @ self.entries + (x @ self.factor).square().sum(-1)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Return draws `(*shape, P)` of covariance `A`, which take `P + R` random numbers each."""
        z, u = (self.entries.new_empty(*shape, n).normal_() for n in self.factor.shape)
        return self.entries.sqrt() * z + u @ self.factor.mT

    def diagonal(self) -> Tensor:
        return self.entries + self.factor.square().sum(-1)

    def to_dense(self) -> Tensor:
        return self.entries.diag_embed() + self.factor @ self.factor.mT

    def logdet(self) -> Tensor:
        return self._positive.log().sum() + 2 * self._lower.diagonal().log().sum()

    def inverse_diagonal(self) -> Tensor:
        # The diagonal of Woodbury's D^-1/2 (I - V (L L^T)^-1 V^T) D^-1/2.
        explained = torch.linalg.solve_triangular(self._lower, self._v.mT, upper=False)
        return (1 - explained.square().sum(0)) / self._positive

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return (z - (z @ self._v) @ self._k.mT @ self._v.mT) / self._root

    def _whiten(self, x: Tensor) -> Tensor:
        y = x / self._root
        return y - (y @ self._v) @ self._k @ self._v.mT

    def relative(self) -> tuple[Tensor, Tensor]:
        """Return `D^1/2`, `(P,)`, and `V = D^-1/2 U`, `(P, R)`, which are computed once."""
        return self._root, self._v

    def inverse_quadratic_of(self, own: Tensor, along: Tensor) -> Tensor:
        """Return `inverse_quadratic` of `X` from `Y Y^T` and `Y V`, where `Y = X D^-1/2`.

        It is `Y Y^T - Y V (I + V^T V)^-1 (Y V)^T`, whose rounding is that of `Y Y^T`.
        """
        explained = torch.linalg.solve_triangular(self._lower, along.mT, upper=False)
        return own - explained.mT @ explained

    def _scaled(self, c: Tensor) -> LowRank:
        return self._like(entries=c * self.entries, factor=c.sqrt() * self.factor)
