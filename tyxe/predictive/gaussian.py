"""Predictions, in the likelihood's parametrisation, from a Gaussian over a net's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.data import Targets, trailing
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Joint, Likelihood
from tyxe.likelihoods.joint import of_part
from tyxe.predictive.links import BINARY_LINKS, CLASS_LINKS, sample_outputs
from tyxe.util import at_least_float32

# From a batch of inputs to the outputs' mean, `(n, ...)`, and covariance, `(n, ..., C, C)`.
Outputs = Callable[[Any], tuple[Tensor, Tensor]]


def check_link(link: str) -> None:
    """Raise a ValueError unless a link is known."""
    check.choice("link", link, CLASS_LINKS)


class LinkOptions(NamedTuple):
    """The arguments of `predict_from_gaussian` of the same names."""

    link: str
    num_samples: int
    latents: Mapping[str, Tensor]

    def latents_of(self, num_draws: int) -> dict[str, Tensor]:
        """Return values of the likelihood's own variables for so many draws of the outputs."""
        return {n: v[torch.arange(num_draws) % len(v)] for n, v in self.latents.items()}


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
        latents: draws of the likelihood's own variables, stacked along dimension 0.

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
    return likelihood.aggregate_predictions(outputs, 0, options.latents_of(len(outputs)))


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
    noise = noise.mean(0) if options.latents else noise
    return mean, (_variance(mean, covariance) + noise).sqrt()


@gaussian_prediction.register
def _(likelihood: Joint, mean: Tensor, covariance: Tensor, options: LinkOptions) -> dict[str, Any]:
    found, place = {}, 0
    for name, loc in likelihood.outputs_of(mean).items():
        # Positions of a part are independent of each other in its predictions.
        size, outputs = loc[0].numel(), loc.shape[-1] if loc.dim() > 1 else 1
        block = covariance[:, place : place + size, place : place + size]
        rows = range(0, size, outputs)
        blocks = torch.stack([block[:, r : r + outputs, r : r + outputs] for r in rows], 1)
        blocks = blocks.reshape(*(loc.shape[:-1] if loc.dim() > 1 else loc.shape), outputs, outputs)
        own = options._replace(latents=of_part(options.latents, name))
        found[name] = gaussian_prediction(likelihood._part(name), loc, blocks, own)
        place += size
    return found


# --------------------------------------------------------------------------- log-likelihoods


@singledispatch
def gaussian_log_likelihood(
    likelihood: Likelihood,
    prediction: Any,
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | Targets,
    options: LinkOptions,
) -> Tensor:
    """Return `log E p(y | f)` for Gaussian outputs `f`, `(n,)`, in nats.

    The expectation is the mean over samples of the outputs, which are independent between
    positions. Register a likelihood that has a closed form.

    Args:
        likelihood: the likelihood of the targets.
        prediction: what `predict_from_gaussian` has returned.
        mean: mean of the outputs, `(n, ...)`.
        covariance: covariance of outputs along the last dimension, `(n, ..., C, C)`.
        targets: targets, `(n, ...)`.
        options: arguments of `predict_from_gaussian`; no samples evaluates at the mean.
    """
    if not options.num_samples:
        outputs = mean[None]
    else:
        outputs = sample_outputs(mean, covariance, options.num_samples)
    latents = options.latents_of(len(outputs))
    rows = mean.shape[:-1] if mean.dim() > 1 else mean.shape
    counted = likelihood.observed(targets)
    if not latents and len(rows) > 1 and counted.values.shape[: len(rows)] == rows:
        # The product over positions of their mixtures, which varies less than their mixture.
        outputs = outputs.flatten(1, len(rows))
        mask = None if counted.mask is None else trailing(counted.mask, len(rows)).expand(rows)
        within = replace(counted, weights=None, mask=mask)
        targets = within.map(lambda part: part.flatten(0, len(rows) - 1))
    each = likelihood.mixture_log_likelihood(outputs, targets, latents)
    return each.view(len(mean), -1).sum(1)


@gaussian_log_likelihood.register
def _(
    likelihood: Joint,
    prediction: Any,
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | Targets,
    options: LinkOptions,
) -> Tensor:
    count = options.num_samples
    outputs = sample_outputs(mean, covariance, count) if count else mean[None]
    latents = options.latents_of(len(outputs))
    return likelihood.mixture_log_likelihood(outputs, targets, latents)


@gaussian_log_likelihood.register
def _(
    likelihood: Categorical,
    prediction: Any,
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | Targets,
    options: LinkOptions,
) -> Tensor:
    # The mean of the probabilities is the likelihood of the mixture.
    return likelihood.log_likelihood(prediction, targets)


@gaussian_log_likelihood.register
def _(
    likelihood: Bernoulli,
    prediction: Any,
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | Targets,
    options: LinkOptions,
) -> Tensor:
    coupled = covariance.shape[-1] > 1 and options.link == "mc"
    if coupled and options.num_samples:
        general = gaussian_log_likelihood.dispatch(Likelihood)
        each: Tensor = general(likelihood, prediction, mean, covariance, targets, options)
        return each
    return likelihood.log_likelihood(prediction, targets)


@gaussian_log_likelihood.register
def _(
    likelihood: HomoskedasticGaussian,
    prediction: Any,
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | Targets,
    options: LinkOptions,
) -> Tensor:
    counted = likelihood.observed(targets)
    residual = at_least_float32(counted.values.to(mean.dtype) - mean)
    covariance = at_least_float32(covariance)
    once = replace(counted, weights=None).counts_within()
    kept = torch.ones_like(residual) if once is None else once.to(residual)
    residual = residual * kept
    by_point = kept.view(*kept.shape[:1], 1) if kept.dim() == 1 else kept
    covariance = covariance * by_point.unsqueeze(-1) * by_point.unsqueeze(-2)
    if not options.num_samples:
        covariance = torch.zeros_like(covariance)
    draws = max((len(v) for v in options.latents.values()), default=1)
    each = []
    for s in range(draws):
        noise = likelihood.scale_of({n: v[s] for n, v in options.latents.items()}, residual)
        each.append(_joint_normal(residual, covariance, noise.to(residual.dtype), by_point))
    return torch.stack(each).logsumexp(0) - math.log(draws)


def _joint_normal(residual: Tensor, covariance: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
    """Return `log N(r; 0, C + diag(noise^2))`, summed over positions, `(n,)`.

    Where `kept` is 0 residual and covariance are too, and the dimension is left out.
    """
    scale = noise.expand_as(residual)
    white = residual / scale
    if residual.dim() == 1:
        white, scale = white[:, None], scale[:, None]
    relative = covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    # Where noise is small, the eigenvalues span more than single precision has.
    exact = relative.dtype if relative.device.type == "mps" else torch.float64
    values, vectors = torch.linalg.eigh(relative.to(exact))
    # Those of I + C' are at least 1, whatever rounding has left of C'.
    values = 1 + values.clamp_min(0)
    turned = (vectors.mT @ white.unsqueeze(-1).to(exact)).squeeze(-1)
    constants = (2 * scale.log() + math.log(2 * math.pi)) * kept
    terms = turned.square() / values + values.log() + constants
    return -0.5 * terms.flatten(1).sum(1).to(residual.dtype)


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)


def _check_logits(likelihood: Categorical | Bernoulli) -> None:
    if not likelihood.logit_predictions:
        raise ValueError(
            "a Gaussian over probabilities leaves [0, 1]: let the net return logits, and the "
            "likelihood have logit_predictions=True; or predict with predictive='bnn'"
        )
