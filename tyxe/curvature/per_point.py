"""Gradients of each data point by itself, where a linear map does not give them for all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = [
    "BUDGET",
    "Objective",
    "Substituted",
    "is_constant",
    "looped_gradients",
    "vectorized_gradients",
]

# Of the sites' values, a batch of one point and its row of the cotangent.
Objective = Callable[[Mapping[str, Tensor], Any, Tensor], Tensor]
# Puts values in the sites' places.
Substituted = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]

# Elements of per-point gradients that are held at a time.
BUDGET = 2**24


def vectorized_gradients(
    objective: Objective, sites: Mapping[str, Tensor], inputs: Any, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return the gradients in the sites for each point, by torch.vmap in bounded chunks.

    Args:
        objective: of the sites' values, a batch of one point, and its row of the cotangent.
        sites: where.
        inputs: a batch; what has no rows, such as a number or None, is the same for all points.
        cotangent: of the outputs' shape.

    Returns:
        `(n, *shape)` for each site.
    """
    dims = tree_map(lambda leaf: 0 if _has_rows(leaf) else None, inputs)

    def on_row(sites: dict[str, Tensor], row: Any, weight: Tensor) -> Tensor:
        batch = tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], row, dims)
        return objective(sites, batch, weight)

    size = sum(value.numel() for value in sites.values())
    gradients = torch.vmap(
        torch.func.grad(on_row), in_dims=(None, dims, 0), chunk_size=max(1, BUDGET // size)
    )
    found: dict[str, Tensor] = gradients(dict(sites), inputs, cotangent)
    return found


def looped_gradients(
    objective: Objective,
    sites: Mapping[str, Tensor],
    inputs: Any,
    cotangent: Tensor,
    substituted: Substituted,
) -> dict[str, Tensor]:
    """Return likewise, point by point, for nets whose kernels torch.vmap does not take."""
    found: dict[str, list[Tensor]] = {name: [] for name in sites}
    for n, weight in enumerate(cotangent):
        at = {name: value.detach().requires_grad_() for name, value in sites.items()}
        with torch.enable_grad():
            row = tree_map(lambda x, n=n: x[n : n + 1] if _has_rows(x) else x, inputs)
            value = objective(at, row, weight)
        with substituted(at):
            grads = torch.autograd.grad(value, list(at.values()), allow_unused=True)
        for name, grad in zip(at, grads, strict=True):
            found[name].append(torch.zeros_like(at[name]) if grad is None else grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def is_constant(argument: Any) -> bool:
    """Say whether all points share an argument of the net: a number, a string or None.

    Example:
        >>> is_constant(3), is_constant(torch.tensor(3.0)), is_constant(torch.zeros(3))
        (True, True, False)
    """
    if isinstance(argument, Tensor):
        return argument.dim() == 0
    return isinstance(argument, bool | int | float | str | None)


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) and not is_constant(leaf):
        raise TypeError(
            "sites outside of linear maps take a gradient for each point, and a "
            f"{type(leaf).__name__} has no rows to take apart: pass the net tensors, or hide these "
            "sites from the prior"
        )
    return not is_constant(leaf)
