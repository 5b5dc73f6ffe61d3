"""Sums and means: over points, by their weights, and over draws."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tyxe import check


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
