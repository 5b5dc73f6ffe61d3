"""The covariance of a net's outputs under a Gaussian over its weights, in the linearised net."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tyxe.curvature.linearize import FactoredRows, Linearization, Rows, full_precision
from tyxe.curvature.per_point import BUDGET
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator

__all__ = [
    "covariance_through",
    "functional_covariance",
    "jacobian",
    "joint_covariance",
    "one_hot",
]

# Elements of Jacobians that are held at a time: more would leave the processor's cache.
CACHED = 2**20


def functional_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    r"""Return `J_n Lambda^-1 J_n^T` for each point [GLM 3].

    Outputs at different positions (pixels) are not coupled: for predictions `(n, ..., C)` there is
    a `C x C` matrix for each position. Where a weight is used at one position, the variance of its
    block comes from the factors of the Jacobian, which is never formed.

    Args:
        linear: the net on a batch.
        precision: `Lambda`, with the blocks that `collect_curvature` gives.

    Returns:
        `(n, ..., C, C)`.
    """
    return _by_position(linear, lambda rows: _covariance(rows, precision))


def covariance_through(linear: Linearization, covariance: Operator) -> Tensor:
    """Return `J_n Sigma J_n^T` as `functional_covariance`, of a covariance that is known itself.

    Args:
        linear: the net on a batch.
        covariance: `Sigma`, over the weights of all groups in their order.

    Returns:
        `(n, ..., C, C)`.
    """

    def quadratic(rows: list[dict[str, Rows]]) -> Tensor:
        dense = _dense(rows)
        return dense @ covariance.matmul(dense).mT

    return _by_position(linear, quadratic)


def _by_position(
    linear: Linearization, function: Callable[[list[dict[str, Rows]]], Tensor]
) -> Tensor:
    outputs = linear.outputs
    classes = outputs.shape[-1] if outputs.dim() > 1 else 1
    found = []
    with full_precision(outputs):
        for position in range(outputs[0].numel() // classes):
            indices = range(position * classes, (position + 1) * classes)
            found.append(function([linear.rows(one) for one in one_hot(outputs, indices)]))
    shape = outputs.shape[1:-1] if outputs.dim() > 1 else ()
    return torch.stack(found, 1).reshape(len(outputs), *shape, classes, classes)


def _dense(rows: list[dict[str, Rows]]) -> Tensor:
    """The rows of all groups, `(n, C, P)`."""
    return torch.stack([torch.cat([r.dense() for r in row.values()], 1) for row in rows], 1)


def jacobian(linear: Linearization) -> Tensor:
    """Return the Jacobian of all outputs of each point, `(n, outputs, P)`.

    Args:
        linear: the net on a batch.
    """
    indices = range(linear.outputs[0].numel())
    with full_precision(linear.outputs):
        return _dense([linear.rows(one) for one in one_hot(linear.outputs, indices)])


def joint_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    """Return `J Lambda^-1 J^T` of all outputs of all points, `(n, ..., n, ...)`.

    Args:
        linear: the net on a batch.
        precision: as in `functional_covariance`.
    """
    rows, shape = jacobian(linear).detach().flatten(0, 1), linear.outputs.shape
    with full_precision(rows):
        return precision.inverse_quadratic(rows).reshape(shape + shape)


def one_hot(outputs: Tensor, indices: range) -> Iterator[Tensor]:
    """Yield cotangents that ask for one element of every point's outputs.

    Args:
        outputs: of the net, `(n, ...)`, in any memory order.
        indices: of the elements.
    """
    for index in indices:
        cotangent = outputs.new_zeros(outputs.shape)
        cotangent.view(len(outputs), -1)[:, index] = 1.0
        yield cotangent


def _covariance(rows: list[dict[str, Rows]], precision: BlockDiagonal) -> Tensor:
    names = list(rows[0])
    if list(precision.blocks) == names:
        pairs = [([row[name] for row in rows], b) for name, b in precision.blocks.items()]
    elif len(names) == 1:
        pairs = [([row[names[0]] for row in rows], b) for b in precision.blocks.values()]
    else:
        return precision.inverse_quadratic(_dense(rows))
    return torch.stack([_block_covariance(row, block) for row, block in pairs]).sum(0)


def _block_covariance(rows: list[Rows], block: Operator) -> Tensor:
    first = rows[0]
    if isinstance(first, FactoredRows) and first.a.shape[2] == 1:
        a = first.a[:, :, 0]
        if a.shape[1] == 1 and isinstance(block, Kronecker | Diagonal | Dense):
            return _single(a[:, 0], _stacked(rows)[..., 0], block)
    held = BUDGET if isinstance(block, Dense) else CACHED
    chunk = max(1, held // (block.size * len(rows)))
    found = []
    for start in range(0, _points(first), chunk):
        part = [_slice(row, start, start + chunk) for row in rows]
        found.append(_summed(part, block))
    return torch.cat(found)


def _summed(rows: list[Rows], block: Operator) -> Tensor:
    """The covariance of gradients that are sums over positions, or known as they are."""
    first = rows[0]
    if isinstance(first, FactoredRows) and first.a.shape[2] == 1 and isinstance(block, Kronecker):
        return block.inverse_quadratic_summed(first.a[:, :, 0], _stacked(rows).mT)
    return block.inverse_quadratic(torch.stack([row.dense() for row in rows], 1))


def _single(a: Tensor, g: Tensor, block: Kronecker | Diagonal | Dense) -> Tensor:
    """The covariance of a map that is used at one position."""
    if not isinstance(block, Diagonal):
        return block.inverse_quadratic_factored(a, g)
    variances = block.inverse_diagonal().view(g.shape[-1], a.shape[-1])
    # sum_oi g_co g_do a_i^2 v_oi, inputs first.
    weights = a.square() @ variances.mT
    return (g * weights.unsqueeze(1)) @ g.mT


def _stacked(rows: list[Rows]) -> Tensor:
    """The gradients of all outputs in a map without groups, `(n, C, outputs, R)`."""
    return torch.stack([row.g[:, :, 0].mT for row in rows if isinstance(row, FactoredRows)], 1)


def _points(rows: Rows) -> int:
    return len(rows.a if isinstance(rows, FactoredRows) else rows.matrix)


def _slice(rows: Rows, start: int, stop: int) -> Rows:
    if isinstance(rows, FactoredRows):
        return FactoredRows(rows.a[start:stop], rows.g[start:stop])
    return type(rows)(rows.matrix[start:stop])
