"""Errors of targets that do not fit: of another shape, outside of the support, or too many."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.data import Targets
from tyxe.util import elementwise


def dataset_size(kind: str, size: Any) -> float | None:
    """Return the number of points, whole or not; None for -1, not known yet."""
    if size is None:
        return None
    hint = f", the number of training points or the sum of their weights: {kind}(len(dataset))"
    found = check.number("dataset_size", size, hint=hint)
    if found == -1:
        return None
    check.number("dataset_size", found, above=0, hint=hint)
    return int(found) if found.is_integer() else found


def within_size(likelihood: Any, targets: Tensor | Targets) -> tuple[Targets, Tensor | None]:
    """Return what `Likelihood.counted` does, or raise for more than `dataset_size`."""
    values = Targets.of(targets).values
    if values.is_complex():
        raise TypeError(f"targets are of {values.dtype}; pass targets.real, or view_as_real")
    found, rows = likelihood.counted(targets)
    count = float(likelihood.count(found))
    if count > likelihood.dataset_size * (1 + 1e-6):
        raise ValueError(
            f"the batch has {count:g} points, but the likelihood was built with "
            f"dataset_size={likelihood.dataset_size}; pass the number of training points"
            + (", the sum of their weights" if found.weights is not None else "")
        )
    return found, rows


def check_batch(likelihood: Any, predictions: Tensor, targets: Tensor | Targets) -> None:
    """Check that the targets of a batch fit, and are not more than the data set has.

    Points that do not count are not checked: their labels may be -1 or NaN. If the net's output is
    not finite, targets are not checked; other code reports that.
    """
    found, rows = within_size(likelihood, targets)
    if rows is not None:
        predictions = predictions[rows.to(predictions.device)]
    if len(found) and bool(predictions.isfinite().all()):
        likelihood.check_targets(predictions, found)


def within_support(likelihood: Any, support: Any, prepared: Tensor, targets: Tensor) -> None:
    """Raise unless prepared targets lie in a support; the message has them as they came."""
    # Infinity is a real number for a support, and has no finite log-likelihood.
    ok = support.check(prepared).all() & (likelihood.takes_infinity | prepared.isfinite()).all()
    if not bool(ok):
        raise ValueError(
            f"targets lie outside the support of {type(likelihood).__name__}: "
            f"{likelihood.expected_range(elementwise(support))}, but they range from "
            f"{targets.min().item()} to {targets.max().item()}"
        )


def shape_message(
    likelihood: Any, expected: torch.Size, given: torch.Size, predictions: torch.Size
) -> str:
    """Say that targets have another shape than expected, and what may fix it."""
    more = len(given) - len(expected)
    if more == 1 and given == predictions and given[-1] > 1:
        hint = "pass classes as integers: targets.argmax(-1)"
    elif more == -1 and expected[-1] == 1:
        hint = "pass targets.unsqueeze(-1), or squeeze the net's output"
    elif more == 1 and given[-1] == 1:
        hint = "pass targets.squeeze(-1), or unsqueeze the net's output"
    elif given == predictions[:1] + predictions[2:]:
        hint = "classes belong in the last dimension: return logits.movedim(1, -1)"
    else:
        hint = likelihood.shape_hint
    return (
        f"{type(likelihood).__name__} got targets of shape {tuple(given)} and expected "
        f"{tuple(expected)}, by its predictions; {hint}"
    )


def reduce_points(values: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    """Return the sum or mean over points, `(..., n)`, by weights `(..., n)`, or all numbers."""
    check.choice("reduction", reduction, ("sum", "mean", "none"))
    if reduction == "none":
        return values
    if reduction == "mean" and not values.shape[-1]:
        raise ValueError("there are no points, and so no mean over them; reduction='sum' is 0")
    if weights is None:
        return values.sum(-1) if reduction == "sum" else values.mean(-1)
    weights = weights.to(values)
    total = (values * weights).sum(-1)
    return total if reduction == "sum" else total / weights.sum(-1)


def stacked(predictions: Any, dim: int) -> Tensor:
    """Return predictions of draws that are stacked along a dimension, at least of one draw."""
    check.one_of("predictions", predictions, Tensor, "a tensor, such as torch.stack(draws)")
    dim = check.count("dim", dim, -predictions.dim(), ", the dimension of the draws")
    check.count("the number of draws in predictions", predictions.shape[dim])
    return predictions


def mean_over(values: Tensor, dim: int, weights: Tensor | None = None) -> Tensor:
    """Return the mean along a dimension, by weights that sum to one where there are some."""
    if weights is None:
        return values.mean(dim)
    return values.movedim(dim, -1) @ _of_draws(weights, values, dim)


def _of_draws(weights: Tensor, values: Tensor, dim: int) -> Tensor:
    check.shape("weights", weights, (values.shape[dim],), ", one for each draw")
    return weights.to(values)


def log_mean_exp(logs: Tensor, dim: int, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the mean of exponentials, see `mean_over`."""
    if weights is None:
        return logs.logsumexp(dim) - math.log(logs.shape[dim])
    return (logs.movedim(dim, -1) + _of_draws(weights, logs, dim).log()).logsumexp(-1)


def mean_of(predictions: Any) -> Tensor:
    """Return the mean, where predictions are a mean and something more."""
    mean: Tensor = predictions[0] if isinstance(predictions, tuple) else predictions
    return mean


def moments(draws: Tensor, dim: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance over draws, where one draw has the variance 0."""
    mean = mean_over(draws, dim, weights)
    return mean, mean_over((draws - mean.unsqueeze(dim)).square(), dim, weights)
