"""Gradients of each data point by itself, for sites without Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe.util import Inputs, is_constant

# A function of the sites' values, a batch of one point and its row of the cotangent.
PointFunction = Callable[[Mapping[str, Tensor], Any, Tensor], Tensor]

# Largest number of elements of per-point gradients held at a time.
BUDGET = 2**24


def vectorized_gradients(
    function: PointFunction, sites: Mapping[str, Tensor], inputs: Inputs, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return the gradient of each point in each site, `(n, *shape)`, by torch.vmap in chunks.

    Args:
        function: a function of the sites' values, a batch of one point and its `cotangent` row.
        sites: the values at which to differentiate.
        inputs: a batch; leaves without rows, such as a number or None, are shared by all points.
        cotangent: a cotangent of the outputs' shape.
    """
    dims = tree_map(lambda leaf: 0 if _has_rows(leaf) else None, inputs)

    def on_row(sites: dict[str, Tensor], row: Inputs, weight: Tensor) -> Tensor:
        batch = tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], row, dims)
        return function(sites, batch, weight)

    size = sum(value.numel() for value in sites.values())
    gradients = torch.vmap(
        torch.func.grad(on_row), in_dims=(None, dims, 0), chunk_size=max(1, BUDGET // size)
    )
    found: dict[str, Tensor] = gradients(dict(sites), inputs, cotangent)
    return found


def looped_gradients(
    function: PointFunction,
    sites: Mapping[str, Tensor],
    inputs: Inputs,
    cotangent: Tensor,
) -> dict[str, Tensor]:
    """Return the gradients of `vectorized_gradients` by a loop over points, without torch.vmap."""
    found: dict[str, list[Tensor]] = {name: [] for name in sites}
    for n, weight in enumerate(cotangent):
        at = {name: value.detach().requires_grad_() for name, value in sites.items()}
        with torch.enable_grad():
            row = tree_map(lambda x, n=n: x[n : n + 1] if _has_rows(x) else x, inputs)
            value = function(at, row, weight)
        grads = torch.autograd.grad(value, list(at.values()), allow_unused=True)
        for name, grad in zip(at, grads, strict=True):
            found[name].append(torch.zeros_like(at[name]) if grad is None else grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) and not is_constant(leaf):
        raise TypeError(
            "sites outside of linear maps take a gradient for each point, and a "
            f"{type(leaf).__name__} has no rows to take apart: pass the net tensors, or hide these "
            "sites from the prior"
        )
    return not is_constant(leaf)
