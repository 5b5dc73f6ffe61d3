"""Sums of `J^T H J` over data in each structure, from gradients of one cotangent at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeGuard

import torch
from torch import Tensor

from tyxe import check
from tyxe.curvature.gradients import BUDGET, OuterProductGradients, PointGradients
from tyxe.data import Targets
from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.likelihoods.output_hessian import OutputHessians
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator
from tyxe.util import at_least_float32, precise


class Accumulator(ABC):
    """Sums up a curvature from the gradients of all cotangents of all batches.

    The sums have the device of `like`, and its dtype if that is float32 at least.

    Attributes:
        totals: all sums, by names of their own; they change in place, once `flush` is called.
    """

    def __init__(self, blocks: ParamBlocks, like: Tensor) -> None:
        self.blocks = blocks
        self._like = at_least_float32(like.new_zeros(()))
        self.totals: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self._like.device

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the sums' dtype."""
        return self._like.new_zeros(shape)

    @abstractmethod
    def add(
        self, gradients: dict[str, PointGradients], first: bool, targets: Targets | None = None
    ) -> None:
        """Add the gradients of one cotangent; `first` marks the first one of a batch.

        `targets` say how often each point counts, which the gradients' squares know already.
        """

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        """Add the GGN of a batch in the only block, a map whose outputs are the net's, if possible.

        `inputs`, `(n, columns)`, are the map's. Where this returns False, the gradients are to be
        added.
        """
        return False

    @abstractmethod
    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yield, with the name of its block, each sum or the sums over its rows."""

    def flush(self) -> None:  # noqa: B027  (most have nothing to do)
        """Add what is held back to the sums."""

    def add_up(self, total: Callable[[Tensor], Tensor]) -> None:
        """Replace each sum by its total over processes, in place."""
        self.flush()
        for each in self.totals.values():
            total(each)

    @abstractmethod
    def operator(self, points: float) -> Operator:
        """Return the sum over all `points` points that were added; nothing is added afterwards."""


class DiagonalAccumulator(Accumulator):
    """Sums the exact diagonal."""

    def __init__(self, blocks: ParamBlocks, like: Tensor) -> None:
        super().__init__(blocks, like)
        self.totals = {block.name: self.zeros(block.size) for block in blocks}

    def add(
        self, gradients: dict[str, PointGradients], first: bool, targets: Targets | None = None
    ) -> None:
        for name, each in gradients.items():
            self.totals[name] += each.squared_sum()

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        self.totals[name] += (hessians.diagonals().mT @ inputs.square()).flatten()
        return True

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.totals.items()

    def operator(self, points: float) -> Operator:
        return BlockDiagonal({name: Diagonal(total) for name, total in self.totals.items()})


class FullAccumulator(Accumulator):
    """Sums the full matrix."""

    def __init__(self, blocks: ParamBlocks, like: Tensor) -> None:
        super().__init__(blocks, like)
        # Only the lower triangle is correct until `operator` mirrors it.
        self.totals = {"all": self.zeros(blocks.size, blocks.size)}
        self._batch: list[dict[str, PointGradients]] = []

    def add(
        self, gradients: dict[str, PointGradients], first: bool, targets: Targets | None = None
    ) -> None:
        held = [g.g.numel() for one in self._batch for g in one.values() if _is_outer_product(g)]
        if first or sum(held) > BUDGET:
            self.flush()
        if all(map(_is_outer_product, gradients.values())):
            self._batch.append(gradients)
        else:
            self._add_dense([gradients])

    def flush(self) -> None:
        # Several cotangents of a batch are summed before the product.
        if len(self._batch) > 1:
            self._add_outer(self._batch)
        elif self._batch:
            self._add_dense(self._batch)
        self._batch = []

    def _add_dense(self, batch: list[dict[str, PointGradients]]) -> None:
        for gradients in batch:
            jacobian = torch.cat([each.dense() for each in gradients.values()], 1)
            self.totals["all"].addmm_(jacobian.mT, jacobian)

    def _add_outer(self, batch: list[dict[str, PointGradients]]) -> None:
        """Add `sum_n (sum_s g_sn g'_sn^T) kron a_n a'_n^T` for each pair of blocks."""
        factors = [_outer_factors([one[name] for one in batch]) for name in self.blocks.names]
        sizes = self.blocks.sizes
        for i, strip in enumerate(self.totals["all"].split(sizes)):
            for j, part in enumerate(strip.split(sizes, 1)[: i + 1]):
                add_outer_products(part, factors[i], factors[j], only_lower=i == j)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        self.flush()
        parts = self.totals["all"].sum(1).split(self.blocks.sizes)
        yield from zip(self.blocks.names, parts, strict=True)

    def operator(self, points: float) -> Operator:
        self.flush()
        # In place, because the matrix may take most of the memory.
        matrix = self.totals.pop("all").tril_()
        matrix += matrix.tril(-1).mT
        return BlockDiagonal({"all": Dense(matrix)})


def _is_outer_product(gradients: PointGradients) -> TypeGuard[OuterProductGradients]:
    """Whether each point's gradient is one outer product: one position, no groups."""
    return isinstance(gradients, OuterProductGradients) and gradients.a.shape[1:3] == (1, 1)


def _outer_factors(columns: list[PointGradients]) -> tuple[Tensor, Tensor]:
    """Return inputs `(n, columns)` and gradients `(n, S, outputs)` of `S` cotangents."""
    products = [each for each in columns if _is_outer_product(each)]
    return products[0].a[:, 0, 0], torch.stack([each.g[:, 0, 0] for each in products], 1)


def add_outer_products(
    block: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], only_lower: bool
) -> None:
    """Add `sum_n (sum_s g_sn h_sn^T) kron a_n b_n^T` to a block of a matrix.

    `left` has inputs `a`, `(n, columns)`, and gradients `g`, `(n, S, outputs)`; `right` has `b` and
    `h`. `only_lower` leaves out blocks above the diagonal of outputs.
    """
    (a, g), (b, h) = left, right
    columns, others = a.shape[1], b.shape[1]
    weights = g.mT @ h
    for o in range(weights.shape[1]):
        stop = o + 1 if only_lower else weights.shape[2]
        weighted = (weights[:, o, :stop, None] * b.unsqueeze(1)).flatten(1)
        block[o * columns : (o + 1) * columns, : stop * others].addmm_(a.mT, weighted)


# Begin the names of a linear block's sums; a block's own begins with the net's prefix.
_INPUTS, _GRADIENTS, _POSITIONS = "inputs of ", "gradients of ", "positions of "


class KroneckerAccumulator(Accumulator):
    """Sums the Kronecker factors of linear blocks, and the exact diagonal of others.

    With `reduce` the gradients of positions that share weights are summed and their inputs averaged
    before the products; otherwise each position counts as a data point.
    """

    def __init__(self, blocks: ParamBlocks, like: Tensor, reduce: bool = False) -> None:
        super().__init__(blocks, like)
        self._reduce = reduce
        linear = [block for block in blocks if isinstance(block, LinearBlock)]
        for block in linear:
            _check_factors(block)
        sides = [
            (block.groups, side) for block in linear for side in (block.columns, block.outputs)
        ]
        check.memory(
            f"the Kronecker factors of {len(linear)} layers",
            sum(groups * side**2 for groups, side in sides) * self._like.element_size(),
            'use structure="diag", or hide the largest layers from the prior',
            self.device,
        )
        self._linear = [block.name for block in linear]
        rest = [block for block in blocks if block.name not in self._linear]
        self.totals = {
            **{_INPUTS + b.name: self.zeros(b.groups, b.columns, b.columns) for b in linear},
            **{_GRADIENTS + b.name: self.zeros(b.groups, b.outputs, b.outputs) for b in linear},
            **{b.name: self.zeros(b.size) for b in rest},
            # Numbers of positions that the averages of inputs are over.
            **{_POSITIONS + b.name: precise(self.zeros()) for b in linear},
        }

    def add(
        self, gradients: dict[str, PointGradients], first: bool, targets: Targets | None = None
    ) -> None:
        for name, each in gradients.items():
            if not isinstance(each, OuterProductGradients):
                self.totals[name] += each.squared_sum()
                continue
            a, g = each.a, each.g
            counts = None if targets is None else _of_positions(targets, a)
            if self._reduce:
                (a, counts), g = _reduced(a, counts), g.sum(1, keepdim=True)
            self.totals[_GRADIENTS + name] += _second_moment(g)
            if first:
                self._add_inputs(name, a, counts)

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        self.totals[_GRADIENTS + name] += hessians.total()
        counts = hessians.counts
        self._add_inputs(name, inputs[:, None, None], None if counts is None else counts[:, None])
        return True

    def _add_inputs(self, name: str, a: Tensor, counts: Tensor | None) -> None:
        if counts is not None:
            a = a * counts.to(a).sqrt()[..., None, None]
        self.totals[_INPUTS + name] += _second_moment(a)
        positions = len(a) * a.shape[1] if counts is None else precise(counts).sum()
        self.totals[_POSITIONS + name] += positions

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        for name, each in self.totals.items():
            if not name.startswith(_POSITIONS):
                yield name.removeprefix(_INPUTS).removeprefix(_GRADIENTS), each

    def operator(self, points: float) -> Operator:
        operators: dict[str, Operator] = {}
        for name in self.blocks.names:
            if name not in self._linear:
                operators[name] = Diagonal(self.totals[name])
                continue
            # Damping is defined for averages as factors and the number of points as scale [T 3.41].
            positions = float(self.totals[_POSITIONS + name])
            factors = self.totals[_GRADIENTS + name], self.totals[_INPUTS + name]
            products = [
                Kronecker.from_factors(gradient / points, inputs / positions, scale=points)
                for gradient, inputs in zip(*factors, strict=True)
            ]
            named: dict[str, Operator] = {str(i): product for i, product in enumerate(products)}
            operators[name] = products[0] if len(products) == 1 else BlockDiagonal(named)
        return BlockDiagonal(operators)


def _of_positions(targets: Targets, a: Tensor) -> Tensor | None:
    """Return how often the inputs at positions count, `(n, R)`; None for once each.

    Where a map has as many positions as the targets have numbers, what is left out of these is left
    out there; elsewhere each position counts as what is left of its point does on average.
    """
    points, mask = targets.counts(), targets.mask
    if points is None:
        return None
    if mask is None or mask.dim() == 1:
        return points[:, None].expand(a.shape[:2])
    each = mask.flatten(1).to(a)
    each = each if targets.weights is None else each * targets.weights[:, None]
    if each.shape[1] == a.shape[1]:
        return each
    return _mean_of_kept(each).expand(a.shape[:2])


def _mean_of_kept(counts: Tensor) -> Tensor:
    """Return how often each point counts, `(n, 1)`, where anything of it does."""
    return counts.sum(1, keepdim=True) / (counts > 0).sum(1, keepdim=True).clamp(min=1)


def _reduced(a: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the mean of inputs over positions, `(n, 1, ...)`, and how often it counts."""
    if counts is None:
        return a.mean(1, keepdim=True), None
    shares = counts / counts.sum(1, keepdim=True).clamp_min(torch.finfo(counts.dtype).tiny)
    mean = (a * shares.to(a)[..., None, None]).sum(1, keepdim=True)
    return mean, _mean_of_kept(counts)


def check_size(structure: str, size: int) -> None:
    """Raise a ValueError for the structure `"full"` over too many weights, `size`."""
    if structure == "full":
        check.memory(
            f'structure "full" over {size:,} weights',
            size**2 * 4,
            'use "kron" or "diag", or fewer weights (a prior with expose_modules=[net.last_layer])',
        )


def _check_factors(block: LinearBlock) -> None:
    sides = max(block.columns, block.outputs)
    check.memory(
        f"the Kronecker factors of {block.name!r}, with a side of {sides:,},",
        block.groups * sides**2 * 4,
        'use structure="diag", or hide this layer from the prior',
    )


def _second_moment(x: Tensor) -> Tensor:
    """Return `sum x x^T` over points and positions, `(groups, features, features)`."""
    _, positions, _, features = x.shape
    if positions > 1 and features <= positions:
        # A product for each point needs no copy of tensors whose positions are last in memory.
        each = x.permute(2, 0, 3, 1)
        return (each @ each.mT).sum(1)
    flat = x.flatten(0, 1).transpose(0, 1)
    return flat.mT @ flat


ACCUMULATORS: dict[str, type[Accumulator]] = {
    "full": FullAccumulator,
    "diag": DiagonalAccumulator,
    "kron": KroneckerAccumulator,
}
