"""Sums of `J^T H J` over data in each structure, from gradients of one cotangent at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.curvature.gradients import OuterProductGradients, PointGradients, budget, squared_sums
from tyxe.curvature.layer_calls import second_moment
from tyxe.data import Targets
from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.likelihoods.output_hessian import OutputHessians
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator
from tyxe.util import at_least_float32, precise

# Gradients of some cotangents, by the names of their blocks in the blocks' order.
Gradients = Sequence[Mapping[str, PointGradients]]


class Accumulator(ABC):
    """Sums up a curvature from the gradients of all cotangents of all batches.

    The sums have the device of `like`, and its dtype if that is float32 at least. Those of outputs
    with different noises are kept apart.
    """

    def __init__(self, blocks: ParamBlocks, like: Tensor, noises: int = 1) -> None:
        self.blocks = blocks
        self.like = at_least_float32(like.new_zeros(()))
        self.noises = noises

    @staticmethod
    @abstractmethod
    def size_of_noise(blocks: ParamBlocks) -> int:
        """Return how many numbers are kept for each noise."""

    @abstractmethod
    def add(
        self, gradients: Gradients, first: bool, targets: Targets | None = None, noise: int = 0
    ) -> None:
        """Add the gradients of some cotangents; `first` marks the first ones of a batch.

        `targets` say how often each point counts, which the gradients' squares know already, and
        `noise` which one the outputs have that the cotangents are of.
        """

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        """Add the GGN of a batch in the only block, a map whose outputs are the net's, if possible.

        It is for one noise. `inputs`, `(n, columns)`, are the map's. Where this returns False, the
        gradients are to be added.
        """
        return False

    @abstractmethod
    def totals(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each sum, or its rows, with the name of its block; they may change in place."""

    @abstractmethod
    def operator(self, points: float) -> Operator:
        """Return the sum over all `points` points that were added; nothing is added afterwards."""

    @abstractmethod
    def parts(self, points: float, scale: float) -> dict[str, Tensor]:
        """Return what `operator(points).scaled(scale)` has of each noise, by its blocks' names.

        These are matrices, diagonals, and of Kronecker products output factors, `(noises, groups,
        outputs, outputs)`, since the other factor and the scale are those of all. It is called
        once, after `operator`.
        """


class DiagonalAccumulator(Accumulator):
    """Sums the exact diagonal."""

    def __init__(self, blocks: ParamBlocks, like: Tensor, noises: int = 1) -> None:
        super().__init__(blocks, like, noises)
        self._totals = {block.name: self.like.new_zeros(noises, block.size) for block in blocks}
        # Gradients of a batch's cotangents that are squared together, by block.
        self._held: dict[str, list[OuterProductGradients]] = {}

    @staticmethod
    def size_of_noise(blocks: ParamBlocks) -> int:
        return blocks.size

    def add(
        self, gradients: Gradients, first: bool, targets: Targets | None = None, noise: int = 0
    ) -> None:
        held = sum(each.g.numel() for own in self._held.values() for each in own)
        if first or held > budget(self.like.device):
            self._flush()
        for name, sums in self._totals.items():
            rows = [each[name] for each in gradients]
            products = [row for row in rows if isinstance(row, OuterProductGradients)]
            # Of so few positions `squared_sums` may take pairs, for many cotangents at once.
            if self.noises == 1 and products and products[0].g.shape[1] <= 32:
                self._held.setdefault(name, []).extend(products)
            else:
                sums[noise].add_(squared_sums(rows))

    def _flush(self) -> None:
        for name, held in self._held.items():
            self._totals[name][0].add_(squared_sums(held))
        self._held = {}

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        self._totals[name] += (hessians.diagonals().mT @ inputs.square()).flatten()
        return True

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        self._flush()
        yield from self._totals.items()

    def operator(self, points: float) -> Operator:
        self._flush()
        return BlockDiagonal({name: Diagonal(each.sum(0)) for name, each in self._totals.items()})

    def parts(self, points: float, scale: float) -> dict[str, Tensor]:
        return {name: scale * total for name, total in self._totals.items()}


class FullAccumulator(Accumulator):
    """Sums the full matrix."""

    def __init__(self, blocks: ParamBlocks, like: Tensor, noises: int = 1) -> None:
        super().__init__(blocks, like, noises)
        # Only the lower triangles are correct until `operator` mirrors them.
        self._matrices = self.like.new_zeros(noises, blocks.size, blocks.size)
        self._matrix = self._matrices[0]  # that of the cotangents which are being added
        # The gradients of cotangents that are added together, block by block.
        self._held: list[list[OuterProductGradients]] = []

    @staticmethod
    def size_of_noise(blocks: ParamBlocks) -> int:
        return blocks.size**2

    def add(
        self, gradients: Gradients, first: bool, targets: Targets | None = None, noise: int = 0
    ) -> None:
        held = sum(each.g.numel() for held in self._held for each in held)
        if first or self.noises > 1 or held > budget(self.like.device):
            self._flush()
        self._matrix = self._matrices[noise]
        for each in gradients:
            outer = [g for g in each.values() if isinstance(g, OuterProductGradients)]
            if len(outer) == len(each) and all(one.is_single for one in outer):
                self._held.append(outer)
            else:
                self._add_dense([*each.values()])

    def _flush(self) -> None:
        # Several cotangents of a batch are summed before the product.
        if len(self._held) > 1:
            self._add_outer([_outer_factors(each) for each in zip(*self._held, strict=True)])
        elif self._held:
            self._add_dense(self._held[0])
        self._held = []

    def _add_dense(self, gradients: Sequence[PointGradients]) -> None:
        jacobian = torch.cat([each.dense() for each in gradients], 1)
        self._matrix.addmm_(jacobian.mT, jacobian)

    def _add_outer(self, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add `sum_n (sum_s g_sn g'_sn^T) kron a_n a'_n^T` for each pair of blocks."""
        sizes = self.blocks.sizes
        for i, strip in enumerate(self._matrix.split(sizes)):
            for j, part in enumerate(strip.split(sizes, 1)[: i + 1]):
                add_outer_products(part, factors[i], factors[j], only_lower=i == j)

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        self._flush()
        for matrix in self._matrices:
            yield from zip(self.blocks.names, matrix.split(self.blocks.sizes), strict=True)

    def operator(self, points: float) -> Operator:
        self._flush()
        # In place, because the matrix may take most of the memory.
        for matrix in self._matrices:
            matrix.tril_()
            matrix += matrix.tril(-1).mT
        one = self._matrices[0] if self.noises == 1 else self._matrices.sum(0)
        return BlockDiagonal({"all": Dense(one)})

    def parts(self, points: float, scale: float) -> dict[str, Tensor]:
        return {"all": self._matrices.mul_(scale)}  # in place, as above


def _outer_factors(cotangents: Sequence[OuterProductGradients]) -> tuple[Tensor, Tensor]:
    """Return a block's inputs `(n, columns)` and gradients `(n, S, outputs)`."""
    return cotangents[0].a[:, 0, 0], torch.stack([each.g[:, 0, 0] for each in cotangents], 1)


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


class KroneckerAccumulator(Accumulator):
    """Sums the Kronecker factors of linear blocks, and the exact diagonal of others.

    With `reduce` the gradients of positions that share weights are summed and their inputs averaged
    before the products; otherwise each position counts as a data point.
    """

    def __init__(
        self, blocks: ParamBlocks, like: Tensor, noises: int = 1, reduce: bool = False
    ) -> None:
        super().__init__(blocks, like, noises)
        self._reduce = reduce
        linear = [block for block in blocks if isinstance(block, LinearBlock)]
        sides = [(b, side) for b in linear for side in (b.columns, b.outputs)]
        for block, side in sides:
            check.memory(
                f"the Kronecker factors of {block.name!r}, with a side of {side:,},",
                block.groups * side**2 * 4,
                'use structure="diag", or hide this layer from the prior',
            )
        check.memory(
            f"the Kronecker factors of {len(linear)} layers",
            sum(block.groups * side**2 for block, side in sides) * self.like.element_size(),
            'use structure="diag", or hide the largest layers from the prior',
            self.like.device,
        )
        zeros = self.like.new_zeros
        self._inputs = {b.name: zeros(b.groups, b.columns, b.columns) for b in linear}
        self._gradients = {b.name: zeros(noises, b.groups, b.outputs, b.outputs) for b in linear}
        # Numbers of positions that the averages of inputs are over; tensors after `totals`.
        self._positions: dict[str, Any] = dict.fromkeys(self._inputs, 0.0)
        self._rest = {b.name: zeros(noises, b.size) for b in blocks if b.name not in self._inputs}

    @staticmethod
    def size_of_noise(blocks: ParamBlocks) -> int:
        linear = [block for block in blocks if isinstance(block, LinearBlock)]
        factors = sum(block.groups * block.outputs**2 for block in linear)
        return factors + blocks.size - sum(block.size for block in linear)

    def add(
        self, gradients: Gradients, first: bool, targets: Targets | None = None, noise: int = 0
    ) -> None:
        for name, sums in self._rest.items():
            sums[noise].add_(squared_sums([each[name] for each in gradients]))
        for name, sums in self._gradients.items():
            rows = [each[name] for each in gradients]
            products = [row for row in rows if isinstance(row, OuterProductGradients)]
            g = torch.cat([row.g for row in products]) if len(rows) > 1 else products[0].g
            sums[noise].add_(second_moment(g.sum(1, keepdim=True) if self._reduce else g))
            if not first:
                continue
            one = products[0]
            counts = None if targets is None else _of_positions(targets, one.g)
            if self._reduce:
                self._add_inputs(name, *_reduced(one.a, counts))
            elif counts is None:
                self._inputs[name] += one.inputs.second_moment()
                self._positions[name] += one.g.shape[:2].numel()
            else:
                self._add_inputs(name, one.a, counts)

    def add_last(self, name: str, inputs: Tensor, hessians: OutputHessians) -> bool:
        self._gradients[name] += hessians.total()
        counts = hessians.counts
        self._add_inputs(name, inputs[:, None, None], None if counts is None else counts[:, None])
        return True

    def _add_inputs(self, name: str, a: Tensor, counts: Tensor | None) -> None:
        if counts is not None:
            a = a * counts.to(a).sqrt()[..., None, None]
        self._inputs[name] += second_moment(a)
        self._positions[name] += len(a) * a.shape[1] if counts is None else precise(counts).sum()

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        self._positions = {n: precise(self.like) + p for n, p in self._positions.items()}
        for sums in (self._inputs, self._gradients, self._positions, self._rest):
            yield from sums.items()

    def operator(self, points: float) -> Operator:
        operators: dict[str, Operator] = {
            n: Diagonal(rest.sum(0)) for n, rest in self._rest.items()
        }
        for name, each in self._inputs.items():
            pairs = zip(self._gradients[name].sum(0), each, strict=True)
            # Damping is defined for averages as factors and the number of points as scale [T 3.41].
            positions = float(self._positions[name])
            own: dict[str, Operator] = {
                str(group): Kronecker.from_factors(gradients / points, inputs / positions, points)
                for group, (gradients, inputs) in enumerate(pairs)
            }
            operators[name] = own["0"] if len(own) == 1 else BlockDiagonal(own)
        return BlockDiagonal({name: operators[name] for name in self.blocks.names})

    def parts(self, points: float, scale: float) -> dict[str, Tensor]:
        factors = {name: each / points for name, each in self._gradients.items()}
        return factors | {name: scale * rest for name, rest in self._rest.items()}


def _of_positions(targets: Targets, like: Tensor) -> Tensor | None:
    """Return how often positions count, `(n, R)`; None for once each.

    Where a map has as many positions as the targets have numbers, the targets' mask and weights are
    those of the positions. Elsewhere a position gets the mean count of the numbers its point keeps.
    """
    points, mask = targets.counts(), targets.mask
    if points is None:
        return None
    if mask is None or targets.has_whole_points:
        return points[:, None].expand(like.shape[:2])
    each = mask.reshape(len(mask), -1).to(like)
    each = each if targets.weights is None else each * targets.weights[:, None]
    if each.shape[1] == like.shape[1]:
        return each
    return _mean_of_kept(each).expand(like.shape[:2])


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


ACCUMULATORS: dict[str, type[Accumulator]] = {
    "full": FullAccumulator,
    "diag": DiagonalAccumulator,
    "kron": KroneckerAccumulator,
}
