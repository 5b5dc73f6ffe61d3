"""Predictions, in the likelihood's parametrisation, from a Gaussian over a net's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from tyxe.likelihoods.joint import of_part
from tyxe.likelihoods.reductions import log_mean_exp
from tyxe.predictive.links import BINARY_LINKS, CLASS_LINKS, NUM_NODES, normal_grid, sample_outputs
from tyxe.util import at_least_float32

MOST_ENDS = 5  # of an integral, from 8 deviations to 5,000

# From a batch of inputs to the outputs' mean, `(n, ...)`, and covariance, `(n, ..., C, C)`.
Outputs = Callable[[Any], tuple[Tensor, Tensor]]


def check_link(link: str) -> None:
    """Raise a ValueError unless a link is known."""
    check.choice("link", link, CLASS_LINKS)


def check_unbounded(likelihood: Likelihood) -> None:
    """Raise a ValueError where the net returns what has bounds, and so no Gaussian."""
    if what := likelihood.bounded_outputs:
        raise ValueError(
            f"a Gaussian over {what} leaves their bounds: let the net return real numbers, and the "
            "likelihood have logit_predictions=True, or positive_scale=False; or predict with "
            "predictive='bnn'"
        )


class LinkOptions(NamedTuple):
    """The arguments of `predict_from_gaussian` of the same names."""

    link: str
    num_samples: int
    latents: Mapping[str, Tensor]

    def latents_of(self, num_draws: int) -> dict[str, Tensor]:
        """Return values of the likelihood's own variables for so many draws of the outputs."""
        return {
            n: v[torch.arange(num_draws, device=v.device) % len(v)] for n, v in self.latents.items()
        }


class GaussianOutputs(NamedTuple):
    """Gaussian outputs of a batch, and how predictions are made of them."""

    mean: Tensor  # `(n, ...)`
    covariance: Tensor  # along the last dimension, `(n, ..., C, C)`
    options: LinkOptions

    def samples(self) -> Tensor:
        """Return samples of the outputs, `(S, n, ...)`."""
        return sample_outputs(self.mean, self.covariance, self.options.num_samples)

    def nodes(self) -> tuple[Tensor, Tensor | None]:
        """Return outputs for averages over them, `(S, n, ...)`, and weights; None for samples.

        For points of one number they are a grid of up to eight deviations.
        """
        if not self._has_one_number():
            return self.samples(), None
        mean = at_least_float32(self.mean)
        nodes, log_weights = normal_grid(mean)
        return mean + self._scale() * nodes, log_weights.flatten().exp()

    def log_mean(self, log_density: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `log E exp(log_density(f))` for a function from outputs `(n, ...)` to `(n,)`.

        For points of one number it is an integral over a grid, which is finer where the function
        needs it: samples may miss narrow densities of targets. Else it is a mean over samples.
        """
        if not self._has_one_number():
            return log_mean_exp(torch.stack([log_density(one) for one in self.samples()]), 0)
        mean, scale = at_least_float32(self.mean), self._scale()

        def at(z: Tensor) -> Tensor:
            return log_density(mean + scale * z.view_as(mean))

        return log_mean_over_normal(at, mean.flatten())

    def _has_one_number(self) -> bool:
        return self.mean.numel() == len(self.mean) and not self.options.latents

    def _scale(self) -> Tensor:
        return self.variance().to(at_least_float32(self.mean)).clamp_min(0).sqrt()

    def variance(self) -> Tensor:
        """Return the variance of each output, `(n, ...)`."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)


def log_mean_over_normal(log_density: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Return `log E exp(log_density(z))` for a standard normal `z` of each point, `(n,)`.

    `like` has the points' number, dtype and device.
    """

    def joint(z: Tensor) -> Tensor:
        return log_density(z) - 0.5 * (z.square() + math.log(2 * math.pi))

    ends = like.new_tensor([-8.0, 8.0]).unsqueeze(1).expand(2, len(like))
    for _ in range(MOST_ENDS):
        found = _log_integral(joint, *ends)
        # A target may be further away. Elsewhere a density may overflow there.
        least = found - 10 - 10 * torch.finfo(found.dtype).eps * found.abs()
        is_far = torch.stack([(joint(end) > least) | (joint(2 * end) > least) for end in ends])
        if not bool(is_far.any()):
            break
        ends = torch.where(is_far, 5 * ends, ends)
    return found


def _log_integral(
    log_density: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, most_grids: int = 6
) -> Tensor:
    """Return the log of an integral for each point, by the trapezoidal rule between its two ends.

    A node that alone has more than a quarter of it lies in a narrow peak. The cells around it then
    get a grid of their own. Of several narrow peaks only the one with the largest node does.
    """
    steps = torch.linspace(0, 1, NUM_NODES, device=low.device, dtype=low.dtype)
    nodes = low + (high - low) * steps.unsqueeze(1)
    logs = torch.stack([log_density(one) for one in nodes])
    cells = nodes.diff(dim=0)
    terms = logs + _log_weights(cells)
    found = terms.logsumexp(0)
    largest, top = terms.max(0)
    is_narrow = (largest - found).exp() > 0.25
    if most_grids == 1 or not bool(is_narrow.any()):
        return found
    first, last = (top - 10).clamp_min(0), (top + 10).clamp_max(len(nodes) - 1)
    low, high = (nodes.gather(0, at.unsqueeze(0))[0] for at in (first, last))
    around = _log_integral(log_density, low, high, most_grids - 1)
    place = torch.arange(len(cells), device=nodes.device).unsqueeze(1)
    others = cells.masked_fill((place >= first) & (place < last), 0.0)
    elsewhere = (logs + _log_weights(others)).logsumexp(0)
    return torch.logaddexp(elsewhere, around).where(is_narrow, found)


def _log_weights(cells: Tensor) -> Tensor:
    """Return the log of each node's weight: half of the width of the cells beside it."""
    none = cells.new_zeros(1, *cells.shape[1:])
    return (0.5 * (torch.cat([none, cells]) + torch.cat([cells, none]))).log()


@check.arguments
def predict_from_gaussian(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    link: str = "mc",
    num_samples: int = 100,
    latents: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return the prediction for Gaussian outputs, of the form of `aggregate_predictions`.

    Probabilities of classes and binary labels are computed by the link, numbers and counts in
    closed form or by quadrature over the noise, and any other likelihood by samples of the outputs.
    For each binary label `"mc"` is an integral over a grid.

    Args:
        likelihood: the likelihood whose parameters the outputs are.
        mean: mean of the outputs, `(n, ...)`.
        covariance: covariance of outputs along the last dimension, `(n, ..., C, C)`.
        link: `"mc"`, `"probit"` or `"bridge"`, for classes and binary labels.
        num_samples: number of samples, if there is no closed form; 0 predicts at the mean.
        latents: draws of the likelihood's own variables, stacked along dimension 0.

    Raises:
        ValueError: the link is unknown, or the outputs have bounds, such as probabilities.

    Reference:
        [GLM] section 3.

    Example:
        >>> import torch, tyxe
        >>> likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=3.0)
        >>> predict_from_gaussian(likelihood, torch.zeros(1, 1), torch.full((1, 1, 1), 16.0))
        (tensor([[0.]]), tensor([[5.]]))
    """
    check_link(link)
    check.shape("mean", mean, ("n", *mean.shape[1:]))
    sizes = (*mean.shape[:-1], *mean.shape[-1:] * 2) if mean.dim() > 1 else (len(mean), 1, 1)
    check.shape("covariance", covariance, sizes, ", of the outputs of each point")
    options = LinkOptions(link, num_samples, latents or {})
    if not num_samples:
        return likelihood.aggregate_predictions(mean[None], 0, options.latents_of(1))
    check_unbounded(likelihood)
    return gaussian_prediction(likelihood, GaussianOutputs(mean, covariance, options))


@singledispatch
def gaussian_prediction(likelihood: Likelihood, outputs: GaussianOutputs) -> Any:
    """Compute `predict_from_gaussian`; register a likelihood that has a closed form here."""
    samples = outputs.samples()
    return likelihood.aggregate_predictions(samples, 0, outputs.options.latents_of(len(samples)))


@gaussian_prediction.register
def _(likelihood: Categorical, outputs: GaussianOutputs) -> Tensor:
    link = CLASS_LINKS[outputs.options.link]
    return link(outputs.mean, outputs.covariance, outputs.options.num_samples)


@gaussian_prediction.register
def _(likelihood: Bernoulli, outputs: GaussianOutputs) -> Tensor:
    link = BINARY_LINKS[outputs.options.link]
    return link(outputs.mean, outputs.variance(), outputs.options.num_samples)


@gaussian_prediction.register(HomoskedasticGaussian)
@gaussian_prediction.register(StudentT)
def _(
    likelihood: HomoskedasticGaussian | StudentT, outputs: GaussianOutputs
) -> tuple[Tensor, Tensor]:
    latents = outputs.options.latents
    noise = likelihood._variance(latents, outputs.mean)
    noise = noise.mean(0) if latents else noise
    return outputs.mean, (outputs.variance() + noise).sqrt()


@gaussian_prediction.register(Poisson)
@gaussian_prediction.register(NegativeBinomial)
def _(likelihood: Poisson | NegativeBinomial, outputs: GaussianOutputs) -> Tensor:
    # The log of the mean of a log-normal.
    return at_least_float32(outputs.mean) + outputs.variance() / 2


@gaussian_prediction.register
def _(likelihood: Censored, outputs: GaussianOutputs) -> Any:
    return gaussian_prediction(likelihood.base, outputs)


@gaussian_prediction.register
def _(likelihood: Joint, outputs: GaussianOutputs) -> dict[str, Any]:
    parts = gaussian_parts(likelihood, outputs)
    return {name: gaussian_prediction(likelihood._part(name), own) for name, own in parts}


def gaussian_parts(
    likelihood: Joint, outputs: GaussianOutputs
) -> Iterator[tuple[str, GaussianOutputs]]:
    """Yield the Gaussian outputs of each part, whose positions are independent of each other."""
    mean, covariance, options = outputs
    place = 0
    for name, loc in likelihood.outputs_of(mean).items():
        size, classes = loc[0].numel(), loc.shape[-1] if loc.dim() > 1 else 1
        block = covariance[:, place : place + size, place : place + size]
        rows = range(0, size, classes)
        blocks = torch.stack([block[:, r : r + classes, r : r + classes] for r in rows], 1)
        blocks = blocks.reshape(*(loc.shape[:-1] if loc.dim() > 1 else loc.shape), classes, classes)
        own = options._replace(latents=of_part(options.latents, name))
        yield name, GaussianOutputs(loc, blocks, own)
        place += size
