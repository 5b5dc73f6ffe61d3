"""From a Gaussian over a net's outputs to a prediction in the likelihood's own parametrisation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from torch import Tensor

from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian
from tyxe.likelihoods.base import Likelihood
from tyxe.predictive.links import BINARY_LOGITS, CLASS_LINKS, CLASS_LOGITS, sample_outputs

__all__ = ["check_link", "predict_from_gaussian"]


def check_link(link: str) -> None:
    """Raise unless a link is known.

    Raises:
        ValueError: it is not.
    """
    if link not in CLASS_LINKS:
        raise ValueError(f"link is {link!r}; expected one of {', '.join(map(repr, CLASS_LINKS))}")


@singledispatch
def predict_from_gaussian(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return the prediction when outputs are Gaussian, as `aggregate_predictions` would give it.

    Class probabilities by the link, a Gaussian likelihood in closed form, any other by samples of
    the outputs.

    Args:
        likelihood: what the outputs parametrise.
        mean: of the outputs, `(n, ...)`.
        covariance: of those in the last dimension, `(n, ..., C, C)`.
        link: `"mc"`, `"probit"` or `"bridge"`; only for classes and binary labels.
        num_samples: for `"mc"`.
        latents: point values of the likelihood's own variables.

    Reference:
        [GLM] section 3.

    Example:
        >>> import torch, tyxe
        >>> likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=3.0)
        >>> predict_from_gaussian(likelihood, torch.zeros(1, 1), torch.full((1, 1, 1), 16.0))
        (tensor([[0.]]), tensor([[5.]]))
    """
    outputs = sample_outputs(mean, covariance, num_samples)
    each = {
        name: value.expand(num_samples, *value.shape) for name, value in (latents or {}).items()
    }
    return likelihood.aggregate_predictions(outputs, 0, each)


@predict_from_gaussian.register
def _(
    likelihood: Categorical,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> Tensor:
    _check_logits(likelihood)
    return CLASS_LOGITS[link](mean, covariance, num_samples)


@predict_from_gaussian.register
def _(
    likelihood: Bernoulli,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> Tensor:
    _check_logits(likelihood)
    return BINARY_LOGITS[link](mean, _variance(mean, covariance), num_samples)


@predict_from_gaussian.register
def _(
    likelihood: HomoskedasticGaussian,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    noise = likelihood.scale_of(latents, mean).square()
    return mean, (_variance(mean, covariance) + noise).sqrt()


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)


def _check_logits(likelihood: Categorical | Bernoulli) -> None:
    if not likelihood.logit_predictions:
        raise ValueError(
            "a Gaussian over probabilities leaves [0, 1]: let the net return logits, and the "
            "likelihood have logit_predictions=True; or predict with predictive='bnn'"
        )
