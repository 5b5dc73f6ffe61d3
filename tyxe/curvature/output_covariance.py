"""The covariance of a net's outputs under a Gaussian over its weights, in the linearised net."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature.linearize import (
    Linearization,
    OuterProductGradients,
    PointGradients,
)
from tyxe.curvature.per_point import BUDGET
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator

# Elements of Jacobians that are held at a time, so that they fit the processor's cache.
CACHED_ROWS = 2**20


def functional_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    """Return `J_n Lambda^-1 J_n^T`, `(n, ..., C, C)`, for each point [GLM 3].

    For outputs `(n, ..., C)` there is a `C x C` matrix for each position, such as a pixel;
    covariances between positions are left out. The Jacobian of a map without groups that is used at
    one position is not formed.

    Args:
        linear: the net on a batch.
        precision: `Lambda`, in the blocks of `collect_curvature`.
    """
    last, blocks = [*linear.last_inputs().values()], [*precision.blocks.values()]
    if not last or len(blocks) > 1 or not isinstance(blocks[0], Kronecker | Diagonal | Dense):
        return _at_each_position(linear, lambda rows: _covariance(rows, precision))
    outputs = linear.outputs
    _check_covariances(outputs.numel() * outputs.shape[1], outputs.shape[1], outputs)
    with full_precision(outputs):  # each output has itself as gradient
        return _single(last[0], torch.eye(outputs.shape[1]).to(last[0]), blocks[0])


def covariance_through(linear: Linearization, covariance: Operator) -> Tensor:
    """Return `J_n Sigma J_n^T`, `(n, ..., C, C)`, for each point.

    `Sigma` is over all weights in the order of the net's blocks.
    """

    def quadratic(rows: list[dict[str, PointGradients]]) -> Tensor:
        dense = _dense(rows)
        return dense @ covariance.matmul(dense).mT

    return _at_each_position(linear, quadratic)


def _at_each_position(
    linear: Linearization, function: Callable[[list[dict[str, PointGradients]]], Tensor]
) -> Tensor:
    outputs = linear.outputs
    classes = outputs.shape[-1] if outputs.dim() > 1 else 1
    _check_covariances(outputs.numel() * classes, classes, outputs)
    found = []
    with full_precision(outputs):
        for position in range(outputs.shape[1:].numel() // classes):
            indices = range(position * classes, (position + 1) * classes)
            found.append(function([linear.gradients(one) for one in one_hot(outputs, indices)]))
    shape = outputs.shape[1:-1] if outputs.dim() > 1 else ()
    return torch.stack(found, 1).reshape(len(outputs), *shape, classes, classes)


def _check_covariances(numbers: int, classes: int, outputs: Tensor) -> None:
    check.memory(
        f"the covariances of {len(outputs):,} points' outputs, {classes:,} x {classes:,} each,",
        numbers * outputs.element_size(),
        "take smaller batches (predict(..., batch_size=)), or draws of the weights, which need no "
        "covariance: predictive='bnn', the same law where only the last layer has a posterior",
    )


def _dense(rows: list[dict[str, PointGradients]]) -> Tensor:
    """Return the Jacobian, `(n, C, P)`, from the gradients of `C` outputs."""
    return torch.stack([torch.cat([r.dense() for r in row.values()], 1) for row in rows], 1)


def jacobian(linear: Linearization) -> Tensor:
    """Return the Jacobian of all outputs of each point, `(n, outputs, P)`."""
    indices = range(linear.outputs.shape[1:].numel())
    with full_precision(linear.outputs):
        return _dense([linear.gradients(one) for one in one_hot(linear.outputs, indices)])


def jacobian_products(linear: Linearization, vectors: Tensor) -> Tensor:
    """Return `J v`, `(S, n, ...)`, for vectors `(S, P)` in the order of the net's blocks.

    Nothing larger than the gradients of a few points is formed.
    """
    outputs, found = linear.outputs, []
    parts = dict(zip(linear.blocks.names, vectors.split(linear.blocks.sizes, 1), strict=True))
    with full_precision(outputs):
        for one in one_hot(outputs, range(outputs.shape[1:].numel())):
            each = linear.gradients(one)
            found.append(torch.stack([_products(each[n], v) for n, v in parts.items()]).sum(0))
    shape = (len(vectors), *outputs.shape)
    return torch.stack(found, -1).reshape(shape) if found else outputs.new_zeros(shape)


def _products(rows: PointGradients, vectors: Tensor) -> Tensor:
    chunk = max(1, BUDGET // max(1, vectors.shape[1]))
    starts = range(0, max(_points(rows), 1), chunk)
    parts = [_slice(rows, start, start + chunk).dense().detach() for start in starts]
    return torch.cat([vectors.to(part) @ part.mT for part in parts], 1)


def joint_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    """Return `J Lambda^-1 J^T` of all outputs of all points, `(n, ..., n, ...)`."""
    shape = linear.outputs.shape
    check.memory(
        f"the covariance of all outputs of {shape[0]:,} points, {shape.numel():,} x "
        f"{shape.numel():,},",
        shape.numel() ** 2 * linear.outputs.element_size(),
        "take fewer points, or leave joint out, for a covariance of each point's own outputs",
    )
    rows = jacobian(linear).detach().flatten(0, 1)
    with full_precision(rows):
        return precision.inverse_quadratic(rows).reshape(shape + shape)


def one_hot(outputs: Tensor, indices: range) -> Iterator[Tensor]:
    """Yield, for each index, the cotangent of that element of every point's outputs, `(n, ...)`."""
    for index in indices:
        cotangent = outputs.new_zeros(outputs.shape)
        cotangent.view(len(outputs), outputs.shape[1:].numel())[:, index] = 1.0
        yield cotangent


def _covariance(rows: list[dict[str, PointGradients]], precision: BlockDiagonal) -> Tensor:
    names = list(rows[0])
    if list(precision.blocks) == names:
        pairs = [([row[name] for row in rows], b) for name, b in precision.blocks.items()]
    elif len(names) == 1:
        pairs = [([row[names[0]] for row in rows], b) for b in precision.blocks.values()]
    else:
        return precision.inverse_quadratic(_dense(rows))
    return torch.stack([_block_covariance(row, block) for row, block in pairs]).sum(0)


def _block_covariance(rows: list[PointGradients], block: Operator) -> Tensor:
    first = rows[0]
    if isinstance(first, OuterProductGradients) and first.a.shape[2] == 1:
        a = first.a[:, :, 0]
        if a.shape[1] == 1 and isinstance(block, Kronecker | Diagonal | Dense):
            return _single(a[:, 0], _stacked(rows)[..., 0], block)
    held = BUDGET if isinstance(block, Dense) else CACHED_ROWS
    chunk = max(1, held // (block.size * len(rows)))
    found = []
    for start in range(0, max(_points(first), 1), chunk):
        part = [_slice(row, start, start + chunk) for row in rows]
        found.append(_summed(part, block))
    return torch.cat(found)


def _summed(rows: list[PointGradients], block: Operator) -> Tensor:
    """Return the covariance from gradients that are dense, or sums over positions."""
    first = rows[0]
    if (
        isinstance(first, OuterProductGradients)
        and first.a.shape[2] == 1
        and isinstance(block, Kronecker)
    ):
        return block.inverse_quadratic_summed(first.a[:, :, 0], _stacked(rows).mT)
    return block.inverse_quadratic(torch.stack([row.dense() for row in rows], 1))


def _single(a: Tensor, g: Tensor, block: Kronecker | Diagonal | Dense) -> Tensor:
    """Return the covariance from a map that is used at one position."""
    if not isinstance(block, Diagonal):
        return block.inverse_quadratic_factored(a, g)
    variances = block.inverse_diagonal().view(g.shape[-1], a.shape[-1])
    # sum_oi g_co g_do a_i^2 v_oi, where the sum over inputs comes first.
    weights = a.square() @ variances.mT
    return (g * weights.unsqueeze(1)) @ g.mT


def _stacked(rows: list[PointGradients]) -> Tensor:
    """Return the gradients of all outputs in a map without groups, `(n, C, outputs, R)`."""
    return torch.stack(
        [row.g[:, :, 0].mT for row in rows if isinstance(row, OuterProductGradients)], 1
    )


def _points(rows: PointGradients) -> int:
    return len(rows.a if isinstance(rows, OuterProductGradients) else rows.matrix)


def _slice(rows: PointGradients, start: int, stop: int) -> PointGradients:
    if isinstance(rows, OuterProductGradients):
        return OuterProductGradients(rows.a[start:stop], rows.g[start:stop])
    return type(rows)(rows.matrix[start:stop])
