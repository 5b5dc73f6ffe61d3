"""Error and log-likelihood of targets: under a mixture over draws, or under Gaussian outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tyxe.data import Targets, trailing
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
)
from tyxe.likelihoods.base import Predictions
from tyxe.likelihoods.joint import of_part
from tyxe.likelihoods.reductions import log_mean_exp
from tyxe.predictive.gaussian import (
    GaussianOutputs,
    LinkOptions,
    gaussian_parts,
    predict_from_gaussian,
)
from tyxe.util import at_least_float32, precise, without_events


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
    """Return error and log-likelihood of each point, in nats, for draws of outputs `(S, n, ...)`.

    They are of the mixture over draws, or without `aggregate` of each, `(S, n)`. `latents` are
    draws of the likelihood's own variables, stacked.
    """
    if not len(targets):  # all points are masked
        return _of_none(likelihood, targets, outputs.new_zeros(() if aggregate else len(outputs)))
    likelihood.check_targets(outputs[0], targets)
    if aggregate:
        combined = likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)
        found = likelihood.mixture_log_likelihood(outputs, targets, latents)
        return _numbers(likelihood.errors(combined, targets), found, combined)
    errors = torch.stack([likelihood.errors(one, targets) for one in outputs])
    each = []
    for s in range(len(outputs)):
        own = {name: values[s : s + 1] for name, values in latents.items()}
        each.append(likelihood.mixture_log_likelihood(outputs[s : s + 1], targets, own))
    return _numbers(errors, torch.stack(each))


def gaussian_scores(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, targets: Any, options: LinkOptions
) -> Scores:
    """Return error and log-likelihood of each point, in nats, for Gaussian outputs.

    The log-likelihood is that of the mixture over outputs; for classes by the links `"probit"` and
    `"bridge"`, that of the probabilities which they approximate.
    """
    if not options.num_samples:  # a prediction at the mean
        return mixture_scores(likelihood, mean[None], options.latents_of(1), targets)
    if not len(targets):
        return _of_none(likelihood, targets, mean.new_zeros(()))
    likelihood.check_targets(mean, targets)
    prediction = predict_from_gaussian(likelihood, mean, covariance, **options._asdict())
    outputs = GaussianOutputs(mean, covariance, options)
    found = gaussian_log_likelihood(likelihood, outputs, targets, prediction)
    return _numbers(likelihood.errors(prediction, targets), found, prediction)


def _of_none(likelihood: Likelihood, targets: Any, draws: Tensor) -> Scores:
    """Return the scores of no points, for each of some draws."""
    none = draws.new_zeros(*draws.shape, *likelihood.score_counts(targets).shape)
    # The errors of a `Joint` have no row for all of its parts.
    return Scores(none[..., :-1, :] if isinstance(likelihood, Joint) else none, none)


def _numbers(errors: Tensor, log_likelihoods: Tensor, prediction: Any = None) -> Scores:
    bad = log_likelihoods.isnan()
    if bool(bad.any()):
        raise ValueError(
            f"the log-likelihood of {int(bad.sum())} of {bad.numel()} points is not a number: look "
            "for NaN in the inputs, or in the weights"
        )
    return Scores(errors, log_likelihoods, prediction)


# --------------------------------------------------------------------------- closed forms


@singledispatch
def gaussian_log_likelihood(
    likelihood: Likelihood, outputs: GaussianOutputs, targets: Tensor | Targets, prediction: Any
) -> Tensor:
    """Return `log E p(y | f)` for Gaussian outputs `f`, `(n,)`, in nats.

    The expectation is over a grid for one number at each position, else over samples, which are
    independent between positions. `prediction` is what `predict_from_gaussian` returned. Register a
    likelihood that has a closed form.
    """
    (mean, covariance, options), shape = outputs, outputs.mean.shape
    rows = shape[:-1] if len(shape) > 1 else shape
    targets = likelihood.observed(targets)
    if options.latents or _by_position(likelihood, mean, targets, rows) is None:
        samples = outputs.samples()
        return likelihood.mixture_log_likelihood(samples, targets, options.latents_of(len(samples)))
    # The product over positions of their mixtures, which varies less than their mixture.
    last = len(rows) - 1
    flat = GaussianOutputs(mean.flatten(0, last), covariance.flatten(0, last), options)

    def log_density(one: Tensor) -> Tensor:
        each: Tensor = _by_position(likelihood, one.view(shape), targets, rows)
        return each.flatten()

    return flat.log_mean(log_density).view(len(mean), -1).sum(1)


def _by_position(
    likelihood: Likelihood, outputs: Tensor, targets: Targets, rows: torch.Size
) -> Any:
    """Return the log-likelihood of each position, of shape `rows`, or None for one of points."""
    # Within the distribution, a mask of points would make a point of all its positions.
    points = targets.mask if targets.has_whole_points else None
    given = targets if points is None else replace(targets, mask=None)
    distribution, values = likelihood._distribution_for(outputs, given)
    inner = without_events(distribution)
    if inner.batch_shape[: len(rows)] != rows:
        return None
    found = inner.log_prob(values).reshape(*rows, -1).sum(-1)
    return found if points is None else found.where(trailing(points, len(rows)), 0)


@gaussian_log_likelihood.register
def _(
    likelihood: Joint, outputs: GaussianOutputs, targets: Tensor | Targets, prediction: Any
) -> Tensor:
    # Of each part and of all together, `(parts + 1, n)`.
    found = likelihood.observed(targets)
    each = likelihood._by_part(found)
    logs = [
        gaussian_log_likelihood(likelihood._part(name), own, each[name], prediction[name])
        for name, own in gaussian_parts(likelihood, outputs)
    ]
    numbers, given, is_other = _given_numbers(likelihood, outputs, each)
    if not bool(is_other.any()):
        return torch.stack([*logs, numbers.to(logs[0].dtype)])
    samples = given.samples()
    latents = outputs.options.latents_of(len(samples))
    others = likelihood.mixture_log_likelihood(samples, found.masked(is_other), latents)[-1]
    return torch.stack([*logs, (numbers + others).to(logs[0].dtype)])


def _given_numbers(
    likelihood: Joint, outputs: GaussianOutputs, targets: Mapping[str, Targets]
) -> tuple[Tensor, GaussianOutputs, Tensor]:
    """Return the log-density of the parts whose noise is Gaussian and known, `(n,)`.

    It comes with the outputs given the targets of these parts, and the mask of all other targets.
    """
    mean, covariance, options = precise(outputs.mean), precise(outputs.covariance), outputs.options
    residual, kept, noise = torch.zeros_like(mean), torch.zeros_like(mean), torch.ones_like(mean)
    is_other, place = [], 0
    for name, loc in likelihood.outputs_of(mean).items():
        part, own = likelihood._part(name), targets[name]
        here = slice(place, place + loc[0].numel())
        is_known = isinstance(part, HomoskedasticGaussian) and not of_part(options.latents, name)
        if is_known:
            assert isinstance(part, HomoskedasticGaussian)
            counts = own.counts_within(loc.shape)
            ones = torch.ones_like(loc) if counts is None else counts.to(loc)
            kept[:, here] = ones.reshape(len(loc), -1)
            residual[:, here] = ((own.values - loc) * ones).reshape(len(loc), -1)
            noise[:, here] = part.scale_of(like=loc).expand_as(loc).reshape(len(loc), -1)
        flat = own.values.reshape(len(loc), -1)
        is_other.append(torch.full_like(flat, not is_known, dtype=torch.bool))
        place = here.stop
    # Elsewhere `kept` and the residual are 0, so that nothing follows from these outputs.
    tied = kept.unsqueeze(-1) * covariance
    root = relative_root(semi_definite(tied * kept.unsqueeze(-2)), noise)
    half, white = (
        torch.linalg.solve_triangular(root, right / noise.unsqueeze(-1), upper=False)
        for right in (tied, residual.unsqueeze(-1))
    )
    numbers = _log_density(white.squeeze(-1), root, noise, kept)
    moved = mean + (half.mT @ white).squeeze(-1)
    given = GaussianOutputs(moved, semi_definite(covariance - half.mT @ half), options)
    return numbers, given, torch.cat(is_other, -1)


@gaussian_log_likelihood.register
def _(
    likelihood: Categorical, outputs: GaussianOutputs, targets: Tensor | Targets, prediction: Any
) -> Tensor:
    # The mean of the probabilities is the likelihood of the mixture.
    return likelihood.log_likelihood(prediction, targets)


@gaussian_log_likelihood.register
def _(
    likelihood: Bernoulli, outputs: GaussianOutputs, targets: Tensor | Targets, prediction: Any
) -> Tensor:
    if needs_samples(outputs):
        general = gaussian_log_likelihood.dispatch(Likelihood)
        each: Tensor = general(likelihood, outputs, targets, prediction)
        return each
    return likelihood.log_likelihood(prediction, targets)


@gaussian_log_likelihood.register
def _(
    likelihood: Censored, outputs: GaussianOutputs, targets: Tensor | Targets, prediction: Any
) -> Tensor:
    # A number of its own has the Gaussian of the prediction.
    is_own = outputs.covariance.shape[-1] == 1 and not outputs.options.latents
    if is_own and isinstance(likelihood.base, HomoskedasticGaussian):
        return likelihood.log_likelihood(prediction, targets)
    general = gaussian_log_likelihood.dispatch(Likelihood)
    each: Tensor = general(likelihood, outputs, targets, prediction)
    return each


@gaussian_log_likelihood.register
def _(
    likelihood: HomoskedasticGaussian,
    outputs: GaussianOutputs,
    targets: Tensor | Targets,
    prediction: Any,
) -> Tensor:
    mean, covariance = at_least_float32((outputs.mean, outputs.covariance))
    draws = noises_of(likelihood, outputs)
    logs = log_normals(likelihood, targets, [mean] * len(draws), covariance, draws)
    return log_mean_exp(logs.view(*logs.shape[:2], -1).sum(-1), 0).to(mean.dtype)


def noises_of(likelihood: HomoskedasticGaussian, outputs: GaussianOutputs) -> list[Tensor]:
    """Return the scale of the noise at each draw of the likelihood's variables."""
    mean, latents = at_least_float32(outputs.mean), outputs.options.latents
    draws = range(max((len(v) for v in latents.values()), default=1))
    each = ({name: v[s] for name, v in latents.items()} for s in draws)
    return [likelihood.scale_of(own, mean).to(mean.dtype) for own in each]


def log_normals(
    likelihood: Likelihood, targets: Any, locs: Any, covariance: Tensor, noises: Any
) -> Tensor:
    """Return `log N(y; loc, C + diag(noise^2))` for each location and noise, `(K, n, ...)`.

    They are of numbers along the last dimension, without those that are missing, in double
    precision.
    """
    counted = likelihood.observed(targets)
    values = counted.values.to(locs[0])
    once = replace(counted, weights=None).counts_within()
    kept = torch.ones_like(values) if once is None else once.to(values)
    by_point = kept.view(-1, 1) if kept.dim() == 1 else kept
    covariance = semi_definite(covariance * by_point.unsqueeze(-1) * by_point.unsqueeze(-2))
    pairs = zip(locs, noises, strict=True)
    each = [_log_normal((values - a) * kept, covariance, s, by_point) for a, s in pairs]
    return torch.stack(each)


def _log_normal(residual: Tensor, covariance: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
    # Where `kept` is 0 residual and covariance are too, and the dimension is left out.
    scale = noise.expand_as(residual)
    white = residual / scale
    if residual.dim() == 1:
        white, scale = white[:, None], scale[:, None]
    root = relative_root(covariance, scale)
    turned = torch.linalg.solve_triangular(root, white.unsqueeze(-1).to(root), upper=False)
    return _log_density(turned.squeeze(-1), root, scale, kept)


def _log_density(white: Tensor, root: Tensor, scale: Tensor, kept: Tensor) -> Tensor:
    """Return the log-density of a residual `scale * (root @ white)`, without what is not kept."""
    constants = (scale.log() + 0.5 * math.log(2 * math.pi)) * kept
    return -(0.5 * white.square() + root.diagonal(dim1=-2, dim2=-1).log() + constants).sum(-1)


def semi_definite(covariance: Tensor) -> Tensor:
    """Return covariances without what rounding has made negative, in double precision."""
    # Where noise is small, eigenvalues relative to it span more than single precision has.
    exact = precise(covariance)
    if covariance.shape[-1] == 1:
        return exact.clamp_min(0)
    values, vectors = torch.linalg.eigh(exact)
    return (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT


def relative_root(covariance: Tensor, scale: Tensor) -> Tensor:
    """Return the Cholesky factor of `I + C / (scale scale^T)`, for a `semi_definite` `C`."""
    scale = scale.to(covariance)
    relative = covariance / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    return torch.linalg.cholesky(relative + identity)


def needs_samples(outputs: GaussianOutputs) -> bool:
    """Whether binary labels of a point are tied, so that a product of marginals is not theirs."""
    return outputs.covariance.shape[-1] > 1 and outputs.options.link == "mc"
