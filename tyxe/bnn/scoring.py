"""Scores of points: what `evaluate` takes, which rows count, and how they are reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tyxe.bnn.batches import check_has_targets, is_loader
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.base import reduce_points
from tyxe.processes import total
from tyxe.util import Inputs


def check_evaluation(
    input_data: Inputs, y: Tensor | None, reduction: str, group: Any = None
) -> None:
    """Raise where data for `evaluate` have no targets or two, or there is no such reduction."""
    if group is not None and reduction == "none":
        raise ValueError("reduction='none' is of one process: leave process_group out")
    if (y is None) != is_loader(input_data):
        raise ValueError(
            "evaluate needs targets, once: evaluate(inputs, y), or evaluate(loader) with a "
            "loader or list of pairs; several arguments of the net are a tuple"
        )
    if y is not None:
        check_has_targets(y)
    reduce_points(torch.zeros(1), reduction)


def rows_of(values: Tensor, rows: Tensor | None, dim: int) -> Tensor:
    """Return some rows of a tensor along a dimension, or all."""
    return values if rows is None else values.index_select(dim, rows.to(values.device))


def weights_of(likelihood: Likelihood, targets: Any) -> Tensor:
    """Return how often each point of a batch counts, of those that do."""
    kept, _ = likelihood.that_count(targets)
    return torch.ones(len(kept), device=kept.device) if kept.weights is None else kept.weights


def reduced(
    likelihood: Likelihood,
    parts: tuple[Tensor, Tensor, Tensor],
    reduction: str,
    group: Any = None,
) -> Any:
    """Return errors and log-likelihoods reduced over points, by their weights, and processes."""
    *scores, weights = parts
    if group is not None:
        count = total(weights.double().sum(), group) if reduction == "mean" else 1.0
        sums = [total((score * weights).double().sum(-1), group) for score in scores]
        return tuple(likelihood.named(each / count, -1) for each in sums)
    given = None if bool((weights == 1).all()) else weights
    dim = -2 if reduction == "none" else -1
    return tuple(likelihood.named(reduce_points(s, reduction, given), dim) for s in scores)
