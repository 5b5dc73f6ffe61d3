"""Predictions, in the likelihood's parametrisation, from a Gaussian over a net's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from tyxe.errors import check_known
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Likelihood
from tyxe.predictive.links import BINARY_LINKS, CLASS_LINKS, sample_outputs

__all__ = ["LinkOptions", "Outputs", "check_link", "gaussian_prediction", "predict_from_gaussian"]

# From a batch of inputs to the outputs' mean, `(n, ...)`, and covariance, `(n, ..., C, C)`.
Outputs = Callable[[Any], tuple[Tensor, Tensor]]


def check_link(link: str) -> None:
    """Raise a ValueError unless a link is known."""
    check_known("link", link, CLASS_LINKS)


class LinkOptions(NamedTuple):
    """The arguments of `predict_from_gaussian` of the same names."""

    link: str
    num_samples: int
    latents: Mapping[str, Tensor]


def predict_from_gaussian(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return the prediction for Gaussian outputs, of the form of `aggregate_predictions`.

    Probabilities of classes and binary labels are computed by the link, a `HomoskedasticGaussian`
    in closed form, and any other likelihood by samples of the outputs.

    Args:
        likelihood: the likelihood whose parameters the outputs are.
        mean: mean of the outputs, `(n, ...)`.
        covariance: covariance of outputs along the last dimension, `(n, ..., C, C)`.
        link: `"mc"`, `"probit"` or `"bridge"`, for classes and binary labels.
        num_samples: number of samples, where there is no closed form; 0 predicts at the mean.
        latents: point values of the likelihood's own variables.

    Raises:
        ValueError: the link is unknown, or the outputs are probabilities instead of logits.

    Reference:
        [GLM] section 3.

    Example:
        >>> import torch, tyxe
        >>> likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=3.0)
        >>> predict_from_gaussian(likelihood, torch.zeros(1, 1), torch.full((1, 1, 1), 16.0))
        (tensor([[0.]]), tensor([[5.]]))
    """
    check_link(link)
    options = LinkOptions(link, num_samples, latents or {})
    if not num_samples:
        return _averaged(likelihood, mean[None], options)
    return gaussian_prediction(likelihood, mean, covariance, options)


@singledispatch
def gaussian_prediction(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, options: LinkOptions
) -> Any:
    """Compute `predict_from_gaussian`; register a likelihood that has a closed form here."""
    return _averaged(likelihood, sample_outputs(mean, covariance, options.num_samples), options)


def _averaged(likelihood: Likelihood, outputs: Tensor, options: LinkOptions) -> Any:
    each = {name: v.expand(len(outputs), *v.shape) for name, v in options.latents.items()}
    return likelihood.aggregate_predictions(outputs, 0, each)


@gaussian_prediction.register
def _(likelihood: Categorical, mean: Tensor, covariance: Tensor, options: LinkOptions) -> Tensor:
    _check_logits(likelihood)
    return CLASS_LINKS[options.link](mean, covariance, options.num_samples)


@gaussian_prediction.register
def _(likelihood: Bernoulli, mean: Tensor, covariance: Tensor, options: LinkOptions) -> Tensor:
    _check_logits(likelihood)
    variance = _variance(mean, covariance)
    return BINARY_LINKS[options.link](mean, variance, options.num_samples)


@gaussian_prediction.register
def _(
    likelihood: HomoskedasticGaussian, mean: Tensor, covariance: Tensor, options: LinkOptions
) -> tuple[Tensor, Tensor]:
    noise = likelihood.scale_of(options.latents, mean).square()
    return mean, (_variance(mean, covariance) + noise).sqrt()


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)


def _check_logits(likelihood: Categorical | Bernoulli) -> None:
    if not likelihood.logit_predictions:
        raise ValueError(
            "a Gaussian over probabilities leaves [0, 1]: let the net return logits, and the "
            "likelihood have logit_predictions=True; or predict with predictive='bnn'"
        )
