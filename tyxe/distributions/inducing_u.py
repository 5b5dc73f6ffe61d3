"""Families of posteriors `q(U)` of inducing weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributions as td
from torch import Size, Tensor

SampleShape = Size | list[int] | tuple[int, ...]

# Columns of a covariance's root that are mapped at a time, to limit memory.
_CHUNK = 256


class InducingU(td.Distribution, ABC):
    """A distribution over matrices `U` of inducing weights, `(M_r, M_c)`, flattened row by row."""

    arg_constraints = {}  # noqa: RUF012  (torch's own declaration)
    has_rsample = True

    def __init__(self, shape: Size) -> None:
        super().__init__(Size(), shape, validate_args=False)

    @abstractmethod
    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        """Return elementwise variances of `rows U columns^T`; None is the identity."""

    @abstractmethod
    def kl(self, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
        """Return the KL from `MN(0, C_r C_r^T, C_c C_c^T)`, in nats; None is the identity."""

    @abstractmethod
    def components(self) -> tuple[Tensor, Tensor]:
        """Return means `(K, M_r M_c)` of the equally likely Gaussians, and their covariance."""


def _whiten(matrix: Tensor, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
    """Return `C_r^-1 X C_c^-T`."""
    if row_tril is not None:
        matrix = torch.linalg.solve_triangular(row_tril, matrix, upper=False)
    if column_tril is not None:
        matrix = torch.linalg.solve_triangular(column_tril.mT, matrix, upper=True, left=False)
    return matrix


def _inverse(tril: Tensor) -> Tensor:
    identity = torch.eye(len(tril), dtype=tril.dtype, device=tril.device)
    return torch.linalg.solve_triangular(tril, identity, upper=False)


def _sandwich(rows: Tensor | None, matrix: Tensor, columns: Tensor | None) -> Tensor:
    """Return `rows X columns^T`."""
    left = matrix if rows is None else rows @ matrix
    return left if columns is None else left @ columns.mT


def _squared(matrix: Tensor | None) -> Tensor | None:
    return None if matrix is None else matrix.square()


class GaussianU(InducingU):
    """Base of Normal `q(U)`, with means `loc`, `(M_r, M_c)`."""

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @abstractmethod
    def half_logdet(self) -> Tensor:
        """Return half the log-determinant of the covariance `S`."""

    def kl(self, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
        """`1/2 (E |C_r^-1 U C_c^-T|^2 - M_r M_c) + M_c log|C_r| + M_r log|C_c| - 1/2 log|S|`."""
        mean = _whiten(self.loc, row_tril, column_tril)
        inverses = [None if tril is None else _inverse(tril) for tril in (row_tril, column_tril)]
        spread = self.variance_through(*inverses).sum()
        kl = (mean.square().sum() + spread - mean.numel()) / 2 - self.half_logdet()
        for tril, times in ((row_tril, mean.shape[1]), (column_tril, mean.shape[0])):
            if tril is not None:
                kl = kl + times * tril.diagonal().log().sum()
        return kl


class DiagonalU(GaussianU):
    """Independent Normals (FFG-U); means and log-scales are `(M_r, M_c)`."""

    def __init__(self, loc: Tensor, log_scale: Tensor) -> None:
        self.log_scale = log_scale
        super().__init__(loc)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        noise = self.loc.new_empty((*sample_shape, *self.loc.shape)).normal_()
        return torch.addcmul(self.loc, self.log_scale.exp(), noise)

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        return _sandwich(_squared(rows), (2 * self.log_scale).exp(), _squared(columns))

    def half_logdet(self) -> Tensor:
        return self.log_scale.sum()

    def components(self) -> tuple[Tensor, Tensor]:
        return self.loc.reshape(1, -1), torch.diag((2 * self.log_scale).exp().reshape(-1))


class FullU(GaussianU):
    """A Normal with a full covariance (FCG-U), whose Cholesky factor is `(M_r M_c, M_r M_c)`."""

    def __init__(self, loc: Tensor, scale_tril: Tensor) -> None:
        self.scale_tril = scale_tril
        super().__init__(loc)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        noise = self.loc.new_empty((*sample_shape, self.loc.numel())).normal_()
        return self.loc + (noise @ self.scale_tril.mT).unflatten(-1, self.loc.shape)

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        if rows is None and columns is None:
            return self.scale_tril.square().sum(-1).view(self.loc.shape)
        directions = self.scale_tril.mT.unflatten(-1, self.loc.shape)
        parts = [
            _sandwich(rows, chunk, columns).square().sum(0) for chunk in directions.split(_CHUNK)
        ]
        return torch.stack(parts).sum(0)

    def half_logdet(self) -> Tensor:
        return self.scale_tril.diagonal().log().sum()

    def components(self) -> tuple[Tensor, Tensor]:
        return self.loc.reshape(1, -1), self.scale_tril @ self.scale_tril.mT


class MatrixU(GaussianU):
    """A matrix normal, `MN(loc, T_r T_r^T, T_c T_c^T)`."""

    def __init__(self, loc: Tensor, row_scale_tril: Tensor, column_scale_tril: Tensor) -> None:
        self.row_scale_tril, self.column_scale_tril = row_scale_tril, column_scale_tril
        super().__init__(loc)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        noise = self.loc.new_empty((*sample_shape, *self.loc.shape)).normal_()
        return self.loc + self.row_scale_tril @ noise @ self.column_scale_tril.mT

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        factors = (
            tril if matrix is None else matrix @ tril
            for matrix, tril in ((rows, self.row_scale_tril), (columns, self.column_scale_tril))
        )
        return torch.outer(*(factor.square().sum(-1) for factor in factors))

    def half_logdet(self) -> Tensor:
        rows, columns = self.loc.shape
        return (
            columns * self.row_scale_tril.diagonal().log().sum()
            + rows * self.column_scale_tril.diagonal().log().sum()
        )

    def components(self) -> tuple[Tensor, Tensor]:
        root = torch.kron(self.row_scale_tril, self.column_scale_tril)
        return self.loc.reshape(1, -1), root @ root.mT


class Turn:
    """The member of an ensemble that comes first in all layers; drawn at the first use, if None."""

    def __init__(self, first: int | None, size: int) -> None:
        self._first, self.size = first, size

    @property
    def first(self) -> int:
        if self._first is None:
            self._first = int(torch.randint(self.size, ()))
        return self._first


class EnsembleU(InducingU):
    """Equally likely points `(K, M_r, M_c)`; draws take them in turn, and the KL is left out."""

    def __init__(self, members: Tensor, turn: Turn | None = None) -> None:
        self.members = members
        self.turn = Turn(None, len(members)) if turn is None else turn
        self._drawn = 0
        super().__init__(members.shape[1:])

    @property
    def mean(self) -> Tensor:
        return self.members.mean(0)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        count, size = Size(sample_shape).numel(), len(self.members)
        start = self.turn.first + self._drawn
        self._drawn += count
        if not sample_shape:
            return self.members[start % size]
        indices = torch.arange(start, start + count, device=self.members.device) % size
        return self.members[indices].unflatten(0, tuple(sample_shape))

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        return _sandwich(rows, self.members - self.mean, columns).square().mean(0)

    def kl(self, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
        return self.members.new_zeros(())

    def components(self) -> tuple[Tensor, Tensor]:
        means = self.members.flatten(1)
        return means, means.new_zeros(means.shape[1], means.shape[1])


class WhitenedU(InducingU):
    """`C_r^-1 U C_c^-T` for a `U` with the prior `MN(0, C_r C_r^T, C_c C_c^T)`."""

    def __init__(self, base: InducingU, row_tril: Tensor, column_tril: Tensor) -> None:
        self.base, self.row_tril, self.column_tril = base, row_tril, column_tril
        super().__init__(base.event_shape)

    @property
    def mean(self) -> Tensor:
        return _whiten(self.base.mean, self.row_tril, self.column_tril)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return _whiten(self.base.rsample(sample_shape), self.row_tril, self.column_tril)

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        row, column = _inverse(self.row_tril), _inverse(self.column_tril)
        return self.base.variance_through(
            row if rows is None else rows @ row,
            column if columns is None else columns @ column,
        )

    def kl(self, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
        rows = self.row_tril if row_tril is None else self.row_tril @ row_tril
        columns = self.column_tril if column_tril is None else self.column_tril @ column_tril
        return self.base.kl(rows, columns)

    def components(self) -> tuple[Tensor, Tensor]:
        means, covariance = self.base.components()
        joint = torch.kron(_inverse(self.row_tril), _inverse(self.column_tril))
        return means @ joint.mT, joint @ covariance @ joint.mT
