"""Where a linear map's rows hold the data points of a batch, asked of the gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tyxe.curvature.uses import Use, positions

__all__ = ["PLAIN", "Layout", "is_plain", "laid_out", "layout_of", "own_layout", "some_points"]

# The dimension that counts data points, and whether rows of a point lie apart: see `LinearMap`.
Layout = tuple[int, bool]
# Known of maps that hold the points first, as far as they do: of one row a point, for which it is
# the same whether rows of a point are together or apart.
PLAIN: Layout = (-1, False)


def is_plain(use: Use, points: int) -> bool:
    """Say whether a map's output can hold the points in its first dimension only.

    Args:
        use: the map.
        points: number `n` of data points.
    """
    batched = use.event.spatial_dims + 2
    return use.probe.dim() == batched and use.probe.shape[0] == points


def own_layout(use: Use) -> Layout:
    """Return the layout that a map was met with."""
    return use.event.batch_dim, use.event.rows_of_points_are_apart


def laid_out(use: Use, layout: Layout) -> Use:
    """Return a map that is read by a layout."""
    batch_dim, apart = layout
    event = dataclasses.replace(use.event, batch_dim=batch_dim, rows_of_points_are_apart=apart)
    return dataclasses.replace(use, event=event)


def some_points(outputs: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return a cotangent that asks for the outputs of every second point, and which these are.

    Neighbours are never asked together, so rows that are taken for a neighbour's show.

    Args:
        outputs: of the net, `(n, ...)`.
        first: 0 or 1.
    """
    asked = torch.arange(len(outputs), device=outputs.device) % 2 == first
    # Equal weights would cancel in outputs that sum to one.
    weights = torch.arange(outputs[0].numel(), device=outputs.device).cos().to(outputs)
    cotangent = outputs.new_zeros(outputs.shape)
    cotangent[asked] = weights.view(outputs[0].shape)
    return cotangent, asked


def layout_of(
    use: Use, points: int, answers: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Layout, Layout | None]:
    """Find the layout by which the gradient of some points stays in the rows of these.

    Args:
        use: the map.
        points: number `n` of data points.
        answers: gradients in the map's output, and of which points' outputs they are, `(n,)`.

    Returns:
        The layout, and what other batches may know of it: nothing where the gradient is zero, or
        another would do.

    Raises:
        ValueError: there is none.
    """
    gradients = [gradient for gradient, _ in answers]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        return own_layout(use), None  # what is not finite is found and named elsewhere
    fitting = [
        layout
        for layout in _candidates(use, points)
        if all(_stays(laid_out(use, layout), points, *answer) for answer in answers)
    ]
    if not fitting:
        raise ValueError(
            f"in the map of {use.sites[0]!r}, whose output has shape {tuple(use.probe.shape)} for "
            f"{points} data points, the gradient of some points' outputs reaches rows of others: "
            "points influence each other there, as nodes of a graph do, or the rows are not in the "
            "order of the points, or are the same for all. Give batches of one point with all that "
            "it depends on, or an order in which points come first, or hide the parameter from the "
            "prior"
        )
    if len(fitting) > 1 or not any(bool(gradient.any()) for gradient in gradients):
        return fitting[0], None
    return fitting[0], PLAIN if is_plain(use, points) else fitting[0]


def _candidates(use: Use, points: int) -> Iterator[Layout]:
    shape = use.probe.shape[: use.probe.dim() - use.event.spatial_dims - 1]
    if shape.numel() % points or not shape:
        return
    yield own_layout(use)
    if use.event.spatial_dims or is_plain(use, points):
        return
    others = [(dim, False) for dim, size in enumerate(shape) if size == points]
    others += [(0, True)] if len(shape) == 1 else []
    yield from (layout for layout in others if layout != own_layout(use))


def _stays(use: Use, points: int, gradient: Tensor, asked: Tensor) -> bool:
    reached = positions(gradient, use, points).flatten(1).any(1)
    return not bool((reached & ~asked).any())
