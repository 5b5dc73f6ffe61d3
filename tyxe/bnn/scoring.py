"""Scores of points: what `evaluate` takes, which rows count, and how they are reduced.

`predicted` is the one way to predictions beside their targets, for all that compares them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe.bnn.batches import check_has_targets, is_loader
from tyxe.data import Targets, concatenate_targets
from tyxe.likelihoods import Bernoulli, Categorical, Likelihood
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


class Predicted(NamedTuple):
    """Predictions of the points that count, and their targets with weights and mask.

    Attributes:
        likelihood: of both.
        predictions: as `predict` returns them, of these points.
        targets: these points'.
    """

    likelihood: Likelihood
    predictions: Any
    targets: Targets

    @property
    def kind(self) -> str:
        """`"classes"`, one for each point, `"numbers"` with a mean and a scale, or `"others"`."""
        values = self.targets.values
        if isinstance(self.likelihood, Categorical | Bernoulli):
            is_soft = isinstance(self.likelihood, Categorical) and values.is_floating_point()
            return "classes" if values.numel() == len(values) and not is_soft else "others"
        return "numbers" if isinstance(self.predictions, tuple) else "others"

    def classes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return probabilities `(m, C)` of all labels that count, these, and their counts."""
        probs = self.likelihood.class_logits(self.predictions).softmax(-1)
        return flattened(probs, self.targets)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return mean and scale of all numbers that count, `(m,)`, these, and their counts."""
        mean, scale = self.predictions
        pairs = torch.stack([mean, scale.expand_as(mean)], -1)
        pairs, y, counts = flattened(pairs, self.targets)
        return pairs[:, 0], pairs[:, 1], y.to(mean), counts


def predicted(bnn: Any, batches: list[Any], **options: Any) -> Predicted:
    """Return a BNN's predictions of batches beside their targets."""
    likelihood = bnn.likelihood
    found = bnn.predict(batches, **options)
    # Masks are of batches.
    targets = concatenate_targets([likelihood.observed(targets) for _, targets in batches])
    kept, rows = likelihood.counted(targets)
    if isinstance(likelihood, Bernoulli):
        kept = replace(kept, values=kept.values.long())
    return Predicted(likelihood, tree_map(lambda part: rows_of(part, rows, 0), found), kept)


def flattened(predictions: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows of predictions `(n, ..., C)` and numbers `(n, ...)` that count, and how often.

    Counts are None for once each.
    """
    counts, values = targets.counts_within(), targets.values.flatten()
    predictions = predictions.flatten(0, -2)
    if counts is None:
        return predictions, values, None
    counts = counts.flatten()
    kept = counts > 0
    return predictions[kept.to(predictions.device)], values[kept], counts[kept]


def weights_of(likelihood: Likelihood, targets: Any) -> Tensor:
    """Return how often each point of a batch counts, of those that do."""
    kept, _ = likelihood.counted(targets)
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
