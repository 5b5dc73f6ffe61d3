"""Gradients of each data point by itself, and how they are held: dense, or as outer products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe.curvature.layer_calls import MapInputs
from tyxe.util import Inputs, is_constant, vmapped

# A function of the sites' values, a batch of one point and its row of the cotangent.
PointFunction = Callable[[Mapping[str, Tensor], Any, Tensor], Tensor]

ALL = slice(None)
# Largest numbers of elements of per-point gradients held at a time on a processor and on a GPU,
# which does the work of small pieces in less time than the host takes to ask for it.
BUDGET, BUDGET_OF_GPU = 2**24, 2**27


def budget(device: torch.device) -> int:
    """Return how many elements of per-point gradients are held at a time on a device."""
    return BUDGET if device.type == "cpu" else BUDGET_OF_GPU


@dataclass(frozen=True)
class OuterProductGradients:
    """Gradients of one cotangent in a linear block: `sum_r g_nr a_nr^T` for each point.

    `g`, `(n, R, groups, outputs)`, are the gradients in the map's outputs.
    """

    inputs: MapInputs
    g: Tensor

    def __len__(self) -> int:
        return len(self.g)

    @property
    def a(self) -> Tensor:
        """The map's inputs, `(n, R, groups, columns)`, with a one for the bias."""
        return self.inputs.rows

    @property
    def is_single(self) -> bool:
        """Whether each point's gradient is one outer product: one position, no groups."""
        return self.g.shape[1:3] == (1, 1)

    def dense(self, points: slice | Tensor = ALL) -> Tensor:
        """Return the gradients of some points, `(n, P)`."""
        g, a = self.g[points].permute(0, 2, 3, 1), self.a[points].transpose(1, 2)
        products = torch.bmm(g.flatten(0, 1), a.flatten(0, 1))
        return products.unflatten(0, g.shape[:2]).flatten(1)

    def elements(self, places: Tensor) -> Tensor:
        """Return some elements of the gradients, by their places in `(P,)`, as `(n, K)`."""
        positions, columns = self.a.shape[1], self.a.shape[3]
        size = self.a.shape[2:].numel() * self.g.shape[3]
        rows, found = places.div(columns, rounding_mode="floor"), []
        inputs = rows.div(self.g.shape[3], rounding_mode="floor") * columns + places % columns
        is_dense = size <= positions * len(places)
        chunk = max(1, budget(self.g.device) // (size if is_dense else positions * len(places)))
        for start in range(0, len(self), chunk):
            part = slice(start, start + chunk)
            if is_dense:
                found.append(self.dense(part)[:, places])
            else:
                g, a = self.g[part].flatten(2)[..., rows], self.a[part].flatten(2)[..., inputs]
                found.append((g * a).sum(1))
        return torch.cat(found)

    def sum(self) -> Tensor:
        """Return their sum over points, `(P,)`."""
        return torch.einsum("nrgo,nrgi->goi", self.g, self.a).flatten()


@dataclass(frozen=True)
class DenseGradients:
    """Gradients of one cotangent in a block without factors, `(n, P)`."""

    matrix: Tensor

    def __len__(self) -> int:
        return len(self.matrix)

    def dense(self, points: slice | Tensor = ALL) -> Tensor:
        """Return the gradients of some points, `(n, P)`."""
        return self.matrix[points]

    def sum(self) -> Tensor:
        """Return their sum over points, `(P,)`."""
        return self.matrix.sum(0)


PointGradients = OuterProductGradients | DenseGradients


def dense_gradients(rows: Sequence[PointGradients], points: slice | Tensor = ALL) -> Tensor:
    """Return the gradients of `C` cotangents in one block, of some points, `(n, C, P)`."""
    products = [row for row in rows if isinstance(row, OuterProductGradients)]
    if len(products) == 1:
        return products[0].dense(points).unsqueeze(1)
    if not products:
        return torch.stack([row.dense(points) for row in rows], 1)
    g = torch.stack([row.g[points].permute(0, 2, 3, 1) for row in products], 1)
    return torch.einsum("ncgor,nrgi->ncgoi", g, products[0].a[points]).flatten(2)


def squared_sums(rows: Sequence[PointGradients]) -> Tensor:
    """Return the sum over points and some cotangents of one block of gradients' squares, `(P,)`.

    Where they are many for few positions, it is by pairs `r, r'` of these,
    `sum_nrr' (sum_s g_snro g_snr'o) a_nri a_nr'i`, without the gradients of a point.
    """
    cotangents = [row for row in rows if isinstance(row, OuterProductGradients)]
    if not cotangents:
        return functools.reduce(Tensor.add_, (row.dense().square().sum(0) for row in rows))
    first, count = cotangents[0], len(cotangents)
    positions, groups, outputs = first.g.shape[1:]
    if positions == 1:
        # The square of one outer product is the outer product of squares.
        g = functools.reduce(Tensor.add_, (each.g[:, 0].square() for each in cotangents))
        return torch.einsum("ngo,ngi->goi", g, first.a[:, 0].square()).flatten()
    columns, pairs = first.a.shape[3], positions * (positions + 1) // 2
    # To form an element takes as long as some dozens of multiplications.
    by_pairs = pairs * (outputs * columns + 96 * (columns + count * outputs))
    if groups > 1 or count == 1 or by_pairs > count * (positions + 32) * outputs * columns:
        return _squares_by_points(cotangents, groups * outputs * columns)
    a, (r, s) = first.a[:, :, 0], torch.triu_indices(positions, positions, device=first.g.device)
    twice = 1 + (r != s).to(a)
    total = a.new_zeros(outputs, columns)
    chunk = max(1, budget(a.device) // (pairs * (columns + 2 * count * outputs)))
    for start in range(0, len(a), chunk):
        part = slice(start, start + chunk)
        g = torch.stack([each.g[part, :, 0] for each in cotangents])
        of_outputs = (g[:, :, r] * g[:, :, s]).sum(0) * twice[:, None]
        of_inputs = a[part, r] * a[part, s]
        total.addmm_(of_outputs.flatten(0, 1).mT, of_inputs.flatten(0, 1))
    # Products of pairs have both signs: where they add up to zero, rounding may leave less.
    return total.flatten().clamp_min(0)


def _squares_by_points(cotangents: Sequence[OuterProductGradients], size: int) -> Tensor:
    """Return `squared_sums` by the gradients of each point, which have some size."""
    most = max(1, budget(cotangents[0].g.device) // size)
    count = min(len(cotangents), most)
    chunk = most // count
    rows = (
        dense_gradients(cotangents[i : i + count], slice(j, j + chunk)).flatten(0, 1)
        for i in range(0, len(cotangents), count)
        for j in range(0, len(cotangents[0]), chunk)
    )
    return functools.reduce(Tensor.add_, map(_squared_sum, rows))


def _squared_sum(rows: Tensor) -> Tensor:
    """Return the sum over rows of their squares, and change them."""
    if rows.device.type == "cpu":
        return rows.square_().sum(0)
    return torch.linalg.vector_norm(rows, dim=0).square()  # reads them once, and writes nothing


def vectorized_gradients(
    function: PointFunction, sites: Mapping[str, Tensor], inputs: Inputs, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return the gradient of each point in each site, `(n, *shape)`, by torch.vmap in chunks.

    `function` is of the sites' values, a batch of one point and its row of the `cotangent`. Leaves
    of the inputs without rows, such as a number or None, are shared by all points.
    """
    dims = tree_map(lambda leaf: 0 if _has_rows(leaf) else None, inputs)

    def on_row(sites: dict[str, Tensor], row: Inputs, weight: Tensor) -> Tensor:
        batch = tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], row, dims)
        return function(sites, batch, weight)

    size = sum(value.numel() for value in sites.values())
    chunk = max(1, budget(cotangent.device) // size)
    gradients = vmapped(torch.func.grad(on_row), in_dims=(None, dims, 0), chunk_size=chunk)
    found: dict[str, Tensor] = gradients(dict(sites), inputs, cotangent)
    return found


def looped_gradients(
    function: PointFunction,
    sites: Mapping[str, Tensor],
    inputs: Inputs,
    cotangent: Tensor,
    differentiable: bool = False,
) -> dict[str, Tensor]:
    """Return the gradients of `vectorized_gradients` by a loop over points, without torch.vmap."""
    found: dict[str, list[Tensor]] = {name: [] for name in sites}
    for n, weight in enumerate(cotangent):
        at = {name: value.detach().requires_grad_() for name, value in sites.items()}
        with torch.enable_grad():
            row = tree_map(lambda x, n=n: x[n : n + 1] if _has_rows(x) else x, inputs)
            value = function(at, row, weight)
        for name, grad in gradients_by_name([value], at, create_graph=differentiable).items():
            found[name].append(grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def gradients_by_name(
    of: Sequence[Tensor],
    at: Mapping[str, Tensor],
    cotangents: Sequence[Tensor] | None = None,
    **how: bool,
) -> dict[str, Tensor]:
    """Return gradients of the sum of products with cotangents; zeros where there are none."""
    if not any(output.requires_grad for output in of):  # of another branch of the net
        return {name: torch.zeros_like(value) for name, value in at.items()}
    found = torch.autograd.grad(of, [*at.values()], cotangents, materialize_grads=True, **how)
    return dict(zip(at, found, strict=True))


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) and not is_constant(leaf):
        raise TypeError(
            "sites outside of linear maps take a gradient for each point, and a "
            f"{type(leaf).__name__} has no rows to take apart: pass the net tensors, or hide these "
            "sites from the prior"
        )
    return not is_constant(leaf)
