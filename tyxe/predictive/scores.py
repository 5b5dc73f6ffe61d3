"""Error and log-likelihood of targets: under a mixture over draws, or under Gaussian outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tyxe.data import Targets
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.base import Predictions
from tyxe.predictive.gaussian import (
    LinkOptions,
    gaussian_log_likelihood,
    predict_from_gaussian,
)
from tyxe.util import at_least_float32


class Scores(NamedTuple):
    """Error and log-likelihood of each point, in nats, and the prediction that the error is of."""

    error: Tensor
    log_likelihood: Tensor
    prediction: Predictions | None = None


def mixture_scores(
    likelihood: Likelihood,
    outputs: Tensor,
    latents: Mapping[str, Tensor],
    targets: Tensor | Targets,
    aggregate: bool = True,
) -> Scores:
    """Return error and log-likelihood of each point, in nats, for draws of the net's outputs.

    Args:
        likelihood: the likelihood of the targets.
        outputs: `(S, n, ...)`.
        latents: its own variables for each draw, stacked.
        targets: `(n, ...)`.
        aggregate: score the mixture over draws; `False` scores each, `(S, n)`.

    Raises:
        ValueError: targets that do not fit, or a score that is not a number.
    """
    if not len(targets):  # all points are masked
        none = outputs.new_zeros(0 if aggregate else (len(outputs), 0))
        return Scores(none, none)
    likelihood.check_targets(outputs[0], targets)
    if aggregate:
        combined = likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)
        found = likelihood.mixture_log_likelihood(outputs, targets, latents)
        return _numbers(likelihood.errors(combined, targets), found, combined)
    draws = [slice(s, s + 1) for s in range(len(outputs))]
    each = [
        likelihood.mixture_log_likelihood(
            outputs[s], targets, {k: v[s] for k, v in latents.items()}
        )
        for s in draws
    ]
    return _numbers(
        torch.stack([likelihood.errors(one, targets) for one in outputs]), torch.stack(each)
    )


def gaussian_scores(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, targets: Any, options: LinkOptions
) -> Scores:
    """Return error and log-likelihood of each point, in nats, for Gaussian outputs.

    The log-likelihood is that of the mixture over outputs; for classes by the links `"probit"` and
    `"bridge"`, that of the probabilities which they approximate.

    Args:
        likelihood: the likelihood of the targets.
        mean: mean of the outputs, `(n, ...)`.
        covariance: their covariance along the last dimension, `(n, ..., C, C)`.
        targets: `(n, ...)`.
        options: arguments of `predict_from_gaussian`.

    Raises:
        ValueError: targets that do not fit, or a score that is not a number.
    """
    if not len(targets):
        none = mean.new_zeros(0)
        return Scores(none, none)
    likelihood.check_targets(mean, targets)
    prediction = predict_from_gaussian(likelihood, mean, covariance, **options._asdict())
    found = gaussian_log_likelihood(likelihood, prediction, mean, covariance, targets, options)
    return _numbers(likelihood.errors(prediction, targets), found, prediction)


def _numbers(errors: Tensor, log_likelihoods: Tensor, prediction: Any = None) -> Scores:
    bad = log_likelihoods.isnan()
    if bool(bad.any()):
        raise ValueError(
            f"the log-likelihood of {int(bad.sum())} of {bad.numel()} points is not a number: look "
            "for NaN in the inputs, or in the weights"
        )
    return Scores(errors, log_likelihoods, prediction)
