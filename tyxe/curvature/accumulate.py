"""Sums over data of `J^T H J`, in each structure, from gradients of one cotangent at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from tyxe.curvature.linearize import FactoredRows, Rows
from tyxe.curvature.memory import check_memory
from tyxe.curvature.per_point import BUDGET
from tyxe.distributions import Group, LinearGroup
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator, dense_bytes

__all__ = ["ACCUMULATORS", "Accumulator"]


class Accumulator(ABC):
    """Takes the gradients of all cotangents of all batches, and returns the curvature.

    Args:
        groups: of the sites.
        like: a tensor whose device the sums take, and whose dtype, float32 at least.
    """

    def __init__(self, groups: Sequence[Group], like: Tensor) -> None:
        self.groups = list(groups)
        self._like = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the sums' dtype."""
        return self._like.new_zeros(shape)

    @abstractmethod
    def add(self, rows: dict[str, Rows], first: bool) -> None:
        """Add one cotangent of a batch; `first` says that it is the batch's first."""

    @abstractmethod
    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every sum, with the name of its group."""

    @abstractmethod
    def operator(self, points: int) -> Operator:
        """Return the sum over the points that were seen, of which there are `points`."""


class DiagonalAccumulator(Accumulator):
    """The exact diagonal."""

    def __init__(self, groups: Sequence[Group], like: Tensor) -> None:
        super().__init__(groups, like)
        self._sums = {group.name: self.zeros(group.size) for group in groups}

    def add(self, rows: dict[str, Rows], first: bool) -> None:
        for name, row in rows.items():
            self._sums[name] += squared_sum(row)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._sums.items()

    def operator(self, points: int) -> Operator:
        return BlockDiagonal({name: Diagonal(total) for name, total in self._sums.items()})


def squared_sum(rows: Rows) -> Tensor:
    """Return the sum over points of the squared gradients, `(P,)`."""
    if not isinstance(rows, FactoredRows):
        return rows.matrix.square().sum(0)
    a, g = rows.a, rows.g
    if a.shape[1] == 1:
        # The square of an outer product is that of squares: one product for all points.
        squares = torch.einsum("ngo,ngi->goi", g[:, 0].square(), a[:, 0].square())
        return squares.flatten()
    size = a.shape[2] * a.shape[3] * g.shape[3]
    chunk = max(1, BUDGET // size)
    total = a.new_zeros(size)
    for part_a, part_g in zip(a.split(chunk), g.split(chunk), strict=True):
        total += FactoredRows(part_a, part_g).dense().square().sum(0)
    return total


class FullAccumulator(Accumulator):
    """The whole matrix."""

    def __init__(self, groups: Sequence[Group], like: Tensor) -> None:
        super().__init__(groups, like)
        size = sum(group.size for group in groups)
        # Below the diagonal; what is above it follows.
        self._sum = self.zeros(size, size)
        self._batch: list[dict[str, Rows]] = []

    def add(self, rows: dict[str, Rows], first: bool) -> None:
        held = sum(r.g.numel() for row in self._batch for r in row.values() if _is_outer(r))
        if first or held > BUDGET:
            self._flush()
        if all(_is_outer(row) for row in rows.values()):
            self._batch.append(rows)
        else:
            self._add_dense([rows])

    def _flush(self) -> None:
        """Add what is held of a batch: with several cotangents, their sum comes first."""
        if len(self._batch) > 1:
            self._add_outer(self._batch)
        elif self._batch:
            self._add_dense(self._batch)
        self._batch = []

    def _add_dense(self, batch: list[dict[str, Rows]]) -> None:
        for rows in batch:
            jacobian = torch.cat([row.dense() for row in rows.values()], 1)
            self._sum.addmm_(jacobian.mT, jacobian)

    def _add_outer(self, batch: list[dict[str, Rows]]) -> None:
        """`sum_n (sum_s g_sn g'_sn^T) kron a_n a'_n^T` for each pair of groups."""
        factors = [_outer_factors([rows[group.name] for rows in batch]) for group in self.groups]
        sizes = [group.size for group in self.groups]
        for i, strip in enumerate(self._sum.split(sizes)):
            for j, block in enumerate(strip.split(sizes, 1)[: i + 1]):
                add_outer_products(block, factors[i], factors[j], only_lower=i == j)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        self._flush()
        rows = self._sum.sum(1).split([group.size for group in self.groups])
        yield from zip([group.name for group in self.groups], rows, strict=True)

    def operator(self, points: int) -> Operator:
        self._flush()
        # In place: there is little room for copies of what may be the largest thing in memory.
        matrix, self._sum = self._sum.tril_(), self._sum.new_empty(0)
        matrix += matrix.tril(-1).mT
        return BlockDiagonal({"all": Dense(matrix)})


def _is_outer(rows: Rows) -> TypeGuard[FactoredRows]:
    """Whether the gradients are outer products: of one use, at one position."""
    return isinstance(rows, FactoredRows) and rows.a.shape[1:3] == (1, 1)


def _outer_factors(columns: list[Rows]) -> tuple[Tensor, Tensor]:
    """Inputs `(n, columns)` and gradients `(n, S, outputs)` of a group's cotangents."""
    rows = [row for row in columns if _is_outer(row)]
    return rows[0].a[:, 0, 0], torch.stack([row.g[:, 0, 0] for row in rows], 1)


def add_outer_products(
    block: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], only_lower: bool
) -> None:
    """Add `sum_n (sum_s g_sn h_sn^T) kron a_n b_n^T` to a block of a matrix.

    Args:
        block: `(outputs * columns, other outputs * other columns)`.
        left: inputs `a`, `(n, columns)`, and gradients `g`, `(n, S, outputs)`, of one map.
        right: `b` and `h` of the other.
        only_lower: leave out what is above the diagonal of outputs.
    """
    (a, g), (b, h) = left, right
    columns, others = a.shape[1], b.shape[1]
    weights = g.mT @ h
    for o in range(weights.shape[1]):
        stop = o + 1 if only_lower else weights.shape[2]
        weighted = (weights[:, o, :stop, None] * b.unsqueeze(1)).flatten(1)
        block[o * columns : (o + 1) * columns, : stop * others].addmm_(a.mT, weighted)


class KroneckerAccumulator(Accumulator):
    """Factors of linear groups; the exact diagonal of others.

    Args:
        groups: as in `Accumulator`.
        like: as in `Accumulator`.
        reduce: how positions that share weights are summed: `False` expands them, each as a data
            point of its own, `True` sums their gradients and averages their inputs first.
    """

    def __init__(self, groups: Sequence[Group], like: Tensor, reduce: bool = False) -> None:
        super().__init__(groups, like)
        self._reduce = reduce
        linear = [group for group in groups if isinstance(group, LinearGroup)]
        for group in linear:
            _check_factors(group)
        # Of all positions that a factor's average is over.
        self._positions = {group.name: 0 for group in linear}
        self._inputs = {g.name: self.zeros(g.groups, g.columns, g.columns) for g in linear}
        self._gradients = {g.name: self.zeros(g.groups, g.outputs, g.outputs) for g in linear}
        self._rest = {g.name: self.zeros(g.size) for g in groups if g.name not in self._inputs}

    def add(self, rows: dict[str, Rows], first: bool) -> None:
        for name, row in rows.items():
            if not isinstance(row, FactoredRows):
                self._rest[name] += squared_sum(row)
                continue
            a, g = row.a, row.g
            if self._reduce:
                a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
            self._gradients[name] += _second_moment(g)
            if first:
                self._inputs[name] += _second_moment(a)
                self._positions[name] += a.shape[0] * a.shape[1]

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        yield from (*self._inputs.items(), *self._gradients.items(), *self._rest.items())

    def operator(self, points: int) -> Operator:
        blocks: dict[str, Operator] = {}
        for group in self.groups:
            if not isinstance(group, LinearGroup):
                blocks[group.name] = Diagonal(self._rest[group.name])
                continue
            # Averages, and the number of points for the scale: what damping is defined by [T 3.41].
            positions = self._positions[group.name]
            products = [
                Kronecker.from_factors(gradient / points, inputs / positions, scale=points)
                for gradient, inputs in zip(
                    self._gradients[group.name], self._inputs[group.name], strict=True
                )
            ]
            named: dict[str, Operator] = {str(i): product for i, product in enumerate(products)}
            blocks[group.name] = products[0] if len(products) == 1 else BlockDiagonal(named)
        return BlockDiagonal(blocks)


def _check_factors(group: LinearGroup) -> None:
    sides = max(group.columns, group.outputs)
    check_memory(
        f"the Kronecker factors of {group.name!r}, with a side of {sides:,},",
        group.groups * dense_bytes(sides),
        'use structure="diag", or hide this layer from the prior',
    )


def _second_moment(x: Tensor) -> Tensor:
    """`sum x x^T` over points and positions, `(groups, features, features)`."""
    _, positions, _, features = x.shape
    if positions > 1 and features <= positions:
        # Products of each point, in the memory of gradients and patches as they come.
        each = x.permute(2, 0, 3, 1)
        return (each @ each.mT).sum(1)
    flat = x.flatten(0, 1).transpose(0, 1)
    return flat.mT @ flat


ACCUMULATORS: dict[str, type[Accumulator]] = {
    "full": FullAccumulator,
    "diag": DiagonalAccumulator,
    "kron": KroneckerAccumulator,
}
