"""Diagonal matrices, alone and plus a matrix of low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tyxe.linalg.base import Operator, factorization
from tyxe.linalg.checks import check_field, check_non_negative, check_positive_definite, cholesky


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
