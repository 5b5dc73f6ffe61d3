"""Where a linear map's rows hold the data points of a batch, asked of the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from tyxe.curvature.uses import Use, positions

__all__ = ["Layout", "is_plain", "laid_out", "layout_of", "only_point"]

# The dimension that counts data points, and whether rows of a point lie apart: see `LinearMap`.
Layout = tuple[int, bool]


def is_plain(use: Use, points: int) -> bool:
    """Say whether a map's output can hold the points in its first dimension only.

    Args:
        use: the map.
        points: number `n` of data points.
    """
    batched = use.event.spatial_dims + 2
    return use.probe.dim() == batched and use.probe.shape[0] == points


def laid_out(use: Use, layout: Layout) -> Use:
    """Return a map that is read by a layout."""
    batch_dim, apart = layout
    event = dataclasses.replace(use.event, batch_dim=batch_dim, rows_of_points_are_apart=apart)
    return dataclasses.replace(use, event=event)


def only_point(outputs: Tensor, point: int) -> Tensor:
    """Return a cotangent that asks for one point's outputs, each with a weight of its own.

    Args:
        outputs: of the net, `(n, ...)`.
        point: which.
    """
    found = torch.zeros_like(outputs, memory_format=torch.contiguous_format)
    # Equal weights would cancel in outputs that sum to one.
    found[point].view(-1).copy_(torch.arange(found[point].numel()).cos())
    return found


def layout_of(use: Use, points: int, gradients: dict[int, Tensor]) -> Layout:
    """Find the layout by which the gradient of a point stays in that point's rows.

    Args:
        use: the map.
        points: number `n` of data points.
        gradients: in the map's output, of the outputs of single points, by point.

    Raises:
        ValueError: there is none.
    """
    if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
        return _own_layout(use)  # what is not finite is found and named elsewhere
    divisible = use.probe.dim() > 1 and not _rows(use) % points
    for layout in _candidates(use, points) if divisible else ():
        if all(_stays(laid_out(use, layout), points, *each) for each in gradients.items()):
            return layout
    raise ValueError(
        f"in the map of {use.sites[0]!r}, whose output has shape {tuple(use.probe.shape)} for "
        f"{points} data points, the gradient of one point's outputs reaches rows of others: points "
        "influence each other there, as nodes of a graph do, or the rows are not in the order of "
        "the points. Give batches of one point with all that it depends on, or an order in which "
        "points come first, or hide the parameter from the prior"
    )


def _rows(use: Use) -> int:
    """Rows of a linear layer, or images of a convolution."""
    return use.probe.shape[: use.probe.dim() - use.event.spatial_dims - 1].numel()


def _own_layout(use: Use) -> Layout:
    return use.event.batch_dim, use.event.rows_of_points_are_apart


def _candidates(use: Use, points: int) -> Iterator[Layout]:
    yield _own_layout(use)
    if not use.event.spatial_dims:
        for dim, size in enumerate(use.probe.shape[:-1]):
            if size == points:
                yield dim, False
        if use.probe.dim() == 2:
            yield 0, True


def _stays(use: Use, points: int, point: int, gradient: Tensor) -> bool:
    reached = positions(gradient, use, points).flatten(1).any(1)
    reached[point] = False
    return not bool(reached.any())
