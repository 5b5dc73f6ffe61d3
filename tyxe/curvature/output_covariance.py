"""The covariance of a net's outputs under a Gaussian over its weights, in the linearised net."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature.gradients import ALL, OuterProductGradients, PointGradients, budget
from tyxe.curvature.linearize import Linearization
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator
from tyxe.linalg.diagonal import pairs_are_fewer

# Elements of Jacobians that are held at a time on a processor, so that they fit its cache.
CACHED_ROWS = 2**20
# Structures that do not form the Jacobian of a map that is used at one position.
FORMS_NO_ROWS = (Kronecker, Diagonal, Dense)

Gradients = dict[str, PointGradients]


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
    if not last or len(blocks) > 1 or not isinstance(blocks[0], FORMS_NO_ROWS):
        return _at_each_position(linear, lambda rows: _covariance(rows, precision))
    outputs = linear.outputs
    _check_covariances(outputs, outputs.shape[1])
    with full_precision(outputs):  # each output has itself as gradient
        identity = torch.eye(outputs.shape[1], device=last[0].device).to(last[0])
        return blocks[0].inverse_quadratic_factored(last[0].unsqueeze(1), identity.unsqueeze(1))


def covariance_through(linear: Linearization, covariance: Operator) -> Tensor:
    """Return `J_n Sigma J_n^T`, `(n, ..., C, C)`, for each point.

    `Sigma` is over all weights in the order of the net's blocks.
    """

    def quadratic(rows: list[Gradients]) -> Tensor:
        dense = _dense(rows)
        return dense @ covariance.matmul(dense).mT

    return _at_each_position(linear, quadratic)


def _at_each_position(
    linear: Linearization, function: Callable[[list[Gradients]], Tensor]
) -> Tensor:
    outputs = linear.outputs
    classes = outputs.shape[-1] if outputs.dim() > 1 else 1
    _check_covariances(outputs, classes)
    found = []
    with full_precision(outputs):
        for position in range(outputs.shape[1:].numel() // classes):
            indices = range(position * classes, (position + 1) * classes)
            found.append(function([linear.gradients(one) for one in one_hot(outputs, indices)]))
    shape = outputs.shape[1:-1] if outputs.dim() > 1 else ()
    return torch.stack(found, 1).reshape(len(outputs), *shape, classes, classes)


def _check_covariances(outputs: Tensor, classes: int) -> None:
    check.memory(
        f"the covariances of {len(outputs):,} points' outputs, {classes:,} x {classes:,} each,",
        outputs.numel() * classes * outputs.element_size(),
        "take smaller batches (predict(..., batch_size=)), or draws of the weights, which need no "
        "covariance: predictive='bnn', the same law where only the last layer has a posterior",
    )


def _dense(rows: list[Gradients], part: slice = ALL) -> Tensor:
    """Return the Jacobian of some points, `(n, C, P)`, from the gradients of `C` outputs."""
    return torch.stack([torch.cat([r.dense(part) for r in row.values()], 1) for row in rows], 1)


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
    chunks = _chunks(len(rows), vectors.shape[1], budget(vectors.device))
    parts = (rows.dense(chunk) for chunk in chunks)
    return torch.cat([vectors.to(part) @ part.mT for part in parts], 1)


def _chunks(points: int, size: int, held: int) -> Iterator[slice]:
    """Yield some points at a time, at least one, of `size` elements each; one chunk of no point."""
    chunk = max(1, held // max(1, size))
    for start in range(0, max(1, points), chunk):
        yield slice(start, start + chunk)


def joint_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    """Return `J Lambda^-1 J^T` of all outputs of all points, `(n, ..., n, ...)`."""
    shape = linear.outputs.shape
    check.memory(
        f"the covariance of all outputs of {shape[0]:,} points, {shape.numel():,} x "
        f"{shape.numel():,},",
        shape.numel() ** 2 * linear.outputs.element_size(),
        "take fewer points, or leave joint out, for a covariance of each point's own outputs",
    )
    rows = linear.result(jacobian(linear)).flatten(0, 1)
    with full_precision(rows):
        return precision.inverse_quadratic(rows).reshape(shape + shape)


def one_hot(outputs: Tensor, indices: range) -> Iterator[Tensor]:
    """Yield, for each index, the cotangent of that element of every point's outputs, `(n, ...)`."""
    for index in indices:
        cotangent = outputs.new_zeros(outputs.shape)
        cotangent.view(len(outputs), outputs.shape[1:].numel())[:, index] = 1.0
        yield cotangent


def _covariance(rows: list[Gradients], precision: BlockDiagonal) -> Tensor:
    names = list(rows[0])
    if list(precision.blocks) != names and len(names) > 1:
        return _whole_covariance(rows, precision)
    pairs = zip(names, precision.blocks.values(), strict=True)
    parts = [_block_covariance([row[name] for row in rows], block) for name, block in pairs]
    return torch.stack(parts).sum(0)


def _whole_covariance(rows: list[Gradients], precision: Operator) -> Tensor:
    """Return the covariance by a precision over all weights, from few points' Jacobians each."""
    points = len(next(iter(rows[0].values())))
    chunks = _chunks(points, precision.size * len(rows), budget(precision.device))
    return torch.cat([precision.inverse_quadratic(_dense(rows, chunk)) for chunk in chunks])


def _block_covariance(rows: list[PointGradients], block: Operator) -> Tensor:
    """Return a block's part of the covariance, from as many points at a time as fit."""
    products = [row for row in rows if isinstance(row, OuterProductGradients)]
    is_formed = not products or products[0].a.shape[2] > 1  # groups
    size = block.size * len(rows) if is_formed else _elements(products, block)
    found = []
    for chunk in _chunks(len(rows[0]), size, _held(block)):
        if is_formed:
            jacobians = torch.stack([row.dense(chunk) for row in rows], 1)
            found.append(block.inverse_quadratic(jacobians))
        else:
            g = _stacked([row.g[chunk, :, 0] for row in products], block)
            found.append(block.inverse_quadratic_factored(products[0].a[chunk, :, 0], g))
    return torch.cat(found)


def _stacked(rows: list[Tensor], block: Operator) -> Tensor:
    """Return gradients `(n, C, R, outputs)`, in memory as the structure multiplies them."""
    if rows[0].shape[1] == 1 or _by_pairs(rows[0].shape[1], len(rows), block):
        return torch.stack(rows, 1)
    # With positions last, as they are in each gradient.
    outputs_first = isinstance(block, Kronecker)
    found = torch.stack([row.mT for row in rows], 2 if outputs_first else 1)
    return found.permute(0, 2, 3, 1) if outputs_first else found.mT


def _by_pairs(positions: int, classes: int, block: Operator) -> bool:
    at_one = positions == 1 and isinstance(block, Diagonal)
    return at_one or (isinstance(block, Kronecker) and pairs_are_fewer(positions, classes))


def _held(block: Operator) -> int:
    """Return how many elements are held at a time."""
    cached = block.device.type == "cpu" and not isinstance(block, Dense)
    return CACHED_ROWS if cached else budget(block.device)


def _elements(products: list[OuterProductGradients], block: Operator) -> int:
    """Return how many elements `inverse_quadratic_factored` forms for each point."""
    positions, _, columns = products[0].a.shape[1:]
    if _by_pairs(positions, len(products), block):
        return positions**2 * (columns + products[0].g.shape[3])
    return block.size * len(products)
