"""The evidence of a Laplace approximation."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian
from tyxe.likelihoods import HomoskedasticGaussian, Likelihood
from tyxe.linalg import Operator
from tyxe.linalg.functions import invertible


def log_evidence(
    log_likelihood: float | Tensor,
    prior: Gaussian,
    loc: Tensor,
    posterior: Operator,
    temperature: float,
) -> Tensor:
    """Return the log marginal likelihood of the Laplace approximation, in nats.

    `log p(D|w*)/T - 1/2 (w* - m0)^T P0 (w* - m0) + 1/2 log det P0 - 1/2 log det Lambda` [LA]. Where
    the prior is the posterior of earlier data, it is the evidence of the new data given those.

    `posterior` is `Lambda`, and `loc` is `w*`, `(P,)`.

    Raises:
        ValueError: the prior is a penalty whose normaliser is not known.
    """
    if len(prior.terms) > 1 or not invertible(prior.precision):
        raise ValueError(
            "the prior is a penalty whose normaliser is not known, so there is no evidence: keep "
            'one term for all tasks, with accumulate="average"'
        )
    ((mean, precision),) = prior.terms
    penalty = precision.quadratic(loc - mean) - precision.logdet()
    return log_likelihood / temperature - (penalty + posterior.logdet()) / 2


def with_noise(
    curvature: Curvature, likelihood: Likelihood, noise: float | Tensor, is_empirical: bool
) -> Curvature:
    """Return the curvature and its log-likelihood under another noise.

    Args:
        curvature: the curvature under the likelihood's own noise.
        likelihood: a homoskedastic Gaussian.
        noise: standard deviation, one positive number.
        is_empirical: whether the curvature is that of the true labels, which is proportional to
            `noise^-4`; others are proportional to `noise^-2`.

    Raises:
        ValueError: another likelihood or noise.
    """
    if not isinstance(likelihood, HomoskedasticGaussian):
        raise ValueError(
            f"noise is that of a HomoskedasticGaussian, not of a {type(likelihood).__name__}"
        )
    operator = curvature.operator
    scale = torch.as_tensor(noise, dtype=operator.dtype, device=operator.device)
    if scale.dim() or not bool(scale > 0):
        raise ValueError(f"noise is {noise}; expected one positive number")
    ratio = (likelihood.scale_of(like=scale) / scale).square()
    # A homoskedastic Gaussian's error is the sum of squared residuals.
    return dataclasses.replace(
        curvature,
        operator=operator.scaled(ratio.square() if is_empirical else ratio),
        log_likelihood=gaussian_log_likelihood(curvature.error, curvature.num_targets, scale),
    )


def gaussian_log_likelihood(squared_error: float, count: float, noise: Tensor) -> Tensor:
    """Return the log-likelihood, in nats, of `count` targets with a sum of squared residuals."""
    return -0.5 * (
        squared_error / noise.square() + count * (2 * noise.log() + math.log(2 * math.pi))
    )
