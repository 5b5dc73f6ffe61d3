"""Coresets: a few points of each task, kept out of its training for use before a prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tyxe import check
from tyxe.util import at_least_float32


def k_center(inputs: Tensor, size: int) -> Tensor:
    """Return indices, `(size,)`, of points that cover the others, starting from a random one.

    Each is the point farthest from those before it, in Euclidean distance. The largest distance of
    any point to the nearest of them is at most twice the smallest possible. It takes `n * size`
    distances.

    Reference:
        Gonzalez (1985), Clustering to minimize the maximum intercluster distance; Nguyen et al.
        (2018), Variational continual learning, 3.
    """
    # Differences of unsigned bytes would wrap around, and squares overflow in half precision.
    points = at_least_float32(inputs.reshape(len(inputs), -1))
    chosen = [int(torch.randint(len(points), (), device="cpu"))]
    nearest = points.new_full((len(points),), torch.inf)
    while len(chosen) < size:
        nearest = nearest.minimum((points - points[chosen[-1]]).square().sum(-1))
        # Below zero, the distance of points that coincide with a chosen one: none is chosen twice.
        nearest[chosen[-1]] = -1.0
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen, device=inputs.device)


CORESETS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "random": lambda inputs, size: torch.randperm(len(inputs), device=inputs.device)[:size],
    "k-center": k_center,
}


@check.arguments
def coreset_indices(inputs: Tensor, size: int, method: str = "random") -> Tensor:
    """Choose a coreset.

    Args:
        inputs: the inputs of a task, `(n, ...)`.
        size: number of points.
        method: `"random"`, or `"k-center"`: each point is the one farthest from those before it.

    Returns:
        Indices, `(size,)`.

    Raises:
        ValueError: an unknown method; a size below 1, or not below that of the task.

    Example:
        >>> len(coreset_indices(torch.randn(20, 3), 4, "k-center").unique())
        4
    """
    check.choice("method", method, CORESETS)
    hint = ": a coreset has at least one point of the task, and leaves some for training"
    check.number("size", check.count("size", size, 0), above=0, below=len(inputs), hint=hint)
    return CORESETS[method](inputs, size)
