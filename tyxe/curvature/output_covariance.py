"""The covariance of a net's outputs under a Gaussian over its weights, in the linearised net."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature.gradients import (
    ALL,
    OuterProductGradients,
    PointGradients,
    budget,
    dense_gradients,
)
from tyxe.curvature.linearize import Linearization
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank, Operator
from tyxe.linalg.matrices import pairs_are_fewer

# Elements of Jacobians that are held at a time on a processor, so that they fit its cache.
CACHED_ROWS = 2**20
# Structures that do not form the Jacobian of a map that is used at one position.
FORMS_NO_ROWS = (Kronecker, Diagonal, Dense)
# A difference below this share of its terms has lost too many digits.
LOST = 1e-3

Gradients = dict[str, PointGradients]


def functional_covariance(linear: Linearization, precision: BlockDiagonal) -> Tensor:
    """Return `J_n Lambda^-1 J_n^T`, `(n, ..., C, C)`, for each point [GLM 3].

    For outputs `(n, ..., C)` there is a `C x C` matrix for each position, such as a pixel;
    covariances between positions are left out. For a map without groups that is used at one
    position, the Jacobian is not formed.

    Args:
        linear: the net on a batch.
        precision: `Lambda`, in the blocks of `collect_curvature`.
    """
    last, blocks = [*linear.last_inputs().values()], [*precision.blocks.values()]
    if len(blocks) == 1 and isinstance(whole := blocks[0], LowRank):
        sizes = linear.blocks.sizes
        return _at_each_position(linear, lambda rows: _low_rank_covariance(rows, whole, sizes))
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
            found.append(function([*linear.gradients_of(one_hot(outputs, indices))]))
    shape = outputs.shape[1:-1] if outputs.dim() > 1 else ()
    return torch.stack(found, 1).reshape(len(outputs), *shape, classes, classes)


def _check_covariances(outputs: Tensor, classes: int) -> None:
    check.memory(
        f"the covariances of {len(outputs):,} points' outputs, {classes:,} x {classes:,} each,",
        outputs.numel() * classes * outputs.element_size(),
        "take smaller batches (predict(..., batch_size=)), or draws of the weights, which need no "
        "covariance: predictive='bnn', the same law where only the last layer has a posterior",
    )


def _dense(rows: list[Gradients], part: slice | Tensor = ALL) -> Tensor:
    """Return the Jacobian of some points, `(n, C, P)`, from the gradients of `C` outputs."""
    return torch.stack([torch.cat([r.dense(part) for r in row.values()], 1) for row in rows], 1)


def jacobian(linear: Linearization) -> Tensor:
    """Return the Jacobian of all outputs of each point, `(n, outputs, P)`."""
    indices = range(linear.outputs.shape[1:].numel())
    with full_precision(linear.outputs):
        return _dense([*linear.gradients_of(one_hot(linear.outputs, indices))])


def jacobian_products(linear: Linearization, vectors: Tensor) -> Tensor:
    """Return `J v`, `(S, n, ...)`, for vectors `(S, P)` in the order of the net's blocks.

    Nothing larger than the gradients of a few points is formed.
    """
    outputs, found = linear.outputs, []
    parts = dict(zip(linear.blocks.names, vectors.split(linear.blocks.sizes, 1), strict=True))
    with full_precision(outputs):
        for each in linear.gradients_of(one_hot(outputs, range(outputs.shape[1:].numel()))):
            found.append(torch.stack([_products(each[n], v) for n, v in parts.items()]).sum(0))
    shape = (len(vectors), *outputs.shape)
    return torch.stack(found, -1).reshape(shape) if found else outputs.new_zeros(shape)


def _products(rows: PointGradients, vectors: Tensor) -> Tensor:
    chunks = _chunks(len(rows), vectors.shape[1], budget(vectors.device))
    parts = (rows.dense(chunk) for chunk in chunks)
    return torch.cat([vectors.to(part) @ part.mT for part in parts], 1)


def _chunks(points: int, size: int, held: int) -> Iterator[slice]:
    """Yield slices of as many points as fit, of `size` elements each; one of no point."""
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
        points = torch.arange(len(rows[0][names[0]]), device=precision.device)
        return _whole_covariance(rows, precision, points)
    pairs = zip(names, precision.blocks.values(), strict=True)
    parts = [_block_covariance([row[name] for row in rows], block) for name, block in pairs]
    return torch.stack(parts).sum(0)


def _whole_covariance(rows: list[Gradients], precision: Operator, points: Tensor) -> Tensor:
    """Return the covariance of some points by a precision over all weights.

    The Jacobian is formed of few of them each.
    """
    chunks = _chunks(len(points), precision.size * len(rows), budget(points.device))
    each = (precision.inverse_quadratic(_dense(rows, points[chunk])) for chunk in chunks)
    return torch.cat([*each])


def _low_rank_covariance(rows: list[Gradients], precision: LowRank, sizes: Sequence[int]) -> Tensor:
    """Return the covariance by `D + U U^T`, from products of one block's gradients at a time.

    It is a difference. Where it is far below its terms, as in a point whose gradients `U`
    explains, the Jacobian of the point is formed, whose rounding is smaller.
    """
    parts = zip(rows[0], *(x.split(sizes) for x in precision.relative()), strict=True)
    products = [_relative_products([row[name] for row in rows], *part) for name, *part in parts]
    own, along, size = (torch.stack(each).sum(0) for each in zip(*products, strict=True))
    found = precision.inverse_quadratic_of(own, along)
    (lost,) = (found.diagonal(dim1=1, dim2=2) < LOST * size).any(1).nonzero(as_tuple=True)
    if len(lost):
        found[lost] = _whole_covariance(rows, precision, lost)
    return found


def _relative_products(
    rows: list[PointGradients], root: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `Y Y^T`, `Y V` and the size of terms, `(n, C)`, for the Jacobian `J = Y D^1/2`.

    Args:
        rows: gradients of `C` outputs in one block.
        root: `D^1/2` of the block, `(P,)`.
        v: `V` of the block, `(P, S)`.
    """
    products = [row for row in rows if isinstance(row, OuterProductGradients)]
    if products and _is_shorter_by_positions(products, root, v.shape[1]):
        return _products_by_positions(products, root, v)
    found = []
    for part in _chunks(len(rows[0]), v.shape[0] * len(rows), CACHED_ROWS):
        y = dense_gradients(rows, part).div_(root)
        found.append((y @ y.mT, y @ v))
    own, along = (torch.cat(each) for each in zip(*found, strict=True))
    return own, along, own.diagonal(dim1=1, dim2=2)


def _is_shorter_by_positions(rows: list[OuterProductGradients], root: Tensor, kept: int) -> bool:
    """Whether the map at `V` takes fewer products than the gradients and theirs.

    This is so at few positions. All elements of a site have to have the same precision.
    """
    (_, positions, groups, outputs), classes = rows[0].g.shape, len(rows)
    # Products that form gradients of few positions take longer than others.
    others = 1.5 * classes * (positions + classes + kept)
    block, by_output = rows[0].inputs.block, root.view(groups * outputs, -1)
    if groups > 1 or block.weight is None or not 0 < positions * kept < others:
        return False
    parts = (by_output[:, block.columns_of(site)] for site in block.sites)
    return all(bool((part == part[0, 0]).all()) for part in parts)


def _products_by_positions(
    rows: list[OuterProductGradients], root: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `_relative_products` of `J_c = sum_r g_cr a_r^T`, of which `Y V` is by maps at `V`."""
    inputs, fan = rows[0].inputs, rows[0].inputs.block.fan_in
    # With positions last, as they are in memory.
    g = torch.stack([row.g[:, :, 0].mT for row in rows], 1)
    points, _, outputs, positions = g.shape
    flat, a, root = g.flatten(2), inputs.rows[:, :, 0, :fan], root.view(outputs, -1)[0]
    kernel, maps = (a @ a.mT) / root[0].square(), v.mT.unflatten(1, (outputs, -1))
    chunk = max(1, CACHED_ROWS // max(1, points * positions * outputs, len(v)))
    parts = maps[..., :fan].split(chunk)
    along = torch.cat([inputs.mapped(part).flatten(2) @ flat.mT for part in parts], 1).mT / root[0]
    own, weights = (g @ kernel.unsqueeze(1)).flatten(2) @ flat.mT, kernel.diagonal(dim1=1, dim2=2)
    if inputs.block.bias is not None:
        total = g.sum(-1) / root[-1]
        own, along = own + total @ total.mT, along + total @ maps[..., -1].mT
        weights = weights + root[-1].square().reciprocal()
    size = torch.einsum("ncor,nr->nc", g.square(), weights)
    return own, along, size.maximum(own.diagonal(dim1=1, dim2=2))


def _block_covariance(rows: list[PointGradients], block: Operator) -> Tensor:
    """Return a block's part of the covariance, from as many points at a time as fit."""
    products = [row for row in rows if isinstance(row, OuterProductGradients)]
    is_formed = not products or products[0].a.shape[2] > 1  # groups
    size = block.size * len(rows) if is_formed else _elements(products, block)
    found = []
    cached = block.device.type == "cpu" and not isinstance(block, Dense)
    held = CACHED_ROWS if cached else budget(block.device)
    for chunk in _chunks(len(rows[0]), size, held):
        if is_formed:
            jacobians = dense_gradients(rows, chunk)
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


def _elements(products: list[OuterProductGradients], block: Operator) -> int:
    """Return how many elements `inverse_quadratic_factored` forms for each point."""
    positions, _, columns = products[0].a.shape[1:]
    if _by_pairs(positions, len(products), block):
        return positions**2 * (columns + products[0].g.shape[3])
    return block.size * len(products)
