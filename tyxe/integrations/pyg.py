"""PyTorch Geometric: batches of graphs, with masks of their nodes (extra `pyg`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unpack(data: Any, mask: str | None = None, inputs: Sequence[str] = ("x", "edge_index")) -> Any:
    """Return the net's arguments, the targets `y` and how often each counts, from a graph.

    Nodes outside the mask count zero times, and so do those that `NeighborLoader` has added to a
    batch. For a mask, use `functools.partial(unpack, mask="train_mask")`; `dataset_size` is the
    number of nodes in it. A batch of graphs with one target each needs no mask, but
    `inputs=("x", "edge_index", "batch")`.

    Args:
        data: a `Data` or `Batch` of PyTorch Geometric.
        mask: name of a mask of nodes, `(n,)`.
        inputs: names of the net's arguments.

    Raises:
        KeyError: the graph lacks a named attribute.

    Example:
        >>> from torch_geometric.data import Data
        >>> data = Data(x=torch.ones(3, 2), y=torch.arange(3), train_mask=torch.arange(3) < 2)
        >>> _, targets, weights = unpack(data, "train_mask", inputs=["x"])
        >>> targets, weights
        (tensor([0, 1, 2]), tensor([1., 1., 0.]))
    """
    arguments = tuple(data[name] for name in inputs)
    targets = data["y"]
    seeds = getattr(data, "batch_size", None) if "input_id" in data else None
    if mask is None and seeds is None:
        return arguments, targets
    counts = torch.ones(len(targets), device=targets.device)
    if mask is not None:
        counts = counts * data[mask]
    if seeds is not None:
        counts[seeds:] = 0
    return arguments, targets, counts
