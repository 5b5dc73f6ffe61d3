"""The predictive distribution of targets, as a `torch.distributions` object; predicted noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, singledispatch
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe import check
from tyxe.data import Targets
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Poisson,
)
from tyxe.likelihoods.joint import of_part
from tyxe.likelihoods.reductions import log_mean_exp, mean_over
from tyxe.predictive.evaluation import (
    gaussian_log_likelihood,
    log_normals,
    needs_samples,
    noises_of,
    relative_root,
    semi_definite,
)
from tyxe.predictive.gaussian import (
    GaussianOutputs,
    gaussian_parts,
    gaussian_prediction,
    log_mean_over_normal,
    predict_from_gaussian,
)
from tyxe.predictive.links import square_root
from tyxe.threads import exclusive
from tyxe.util import at_least_float32, name_of, precise


@check.arguments
class PredictiveMixture(td.Distribution):
    """A mixture of distributions of the same shapes, such as those of targets at several draws.

    Its `mean` is the average of theirs, also for angles, where that of `bnn.predict` is as the
    likelihood's `aggregate_predictions` defines it.

    Args:
        parts: the distributions.
        weights: weights of the parts, `(S,)`, which sum to one; equal by default.

    Example:
        >>> parts = [td.Normal(torch.zeros(1), torch.ones(1)), td.Normal(torch.ones(1), 1.0)]
        >>> found = PredictiveMixture(parts)
        >>> found.mean, found.variance
        (tensor([0.5000]), tensor([1.2500]))
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, parts: Sequence[td.Distribution], weights: Tensor | None = None) -> None:
        check.count("the number of parts", len(parts))
        self.parts, self.weights = list(parts), weights
        super().__init__(parts[0].batch_shape, parts[0].event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.parts[0].support

    def _mean_of(self, values: list[Tensor]) -> Tensor:
        return mean_over(torch.stack(values), 0, self.weights)

    @property
    def mean(self) -> Tensor:
        return self._mean_of([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        mean = self.mean
        # Where a mean is infinite, as of a Poisson, so is the variance.
        infinite = mean.isinf()
        far = [(part.mean - mean).masked_fill(infinite, math.inf) for part in self.parts]
        each = zip(self.parts, far, strict=True)
        return self._mean_of([part.variance + distance**2 for part, distance in each])

    @check.arguments
    def log_prob(self, value: Tensor) -> Tensor:
        logs = torch.stack([part.log_prob(value) for part in self.parts])
        return log_mean_exp(logs, 0, self.weights)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        lead = Size(sample_shape)
        with exclusive(), torch.no_grad():  # other threads set the generators back for a while
            found = self.parts[0].sample(lead)
            shares = torch.ones(len(self.parts), device=found.device)
            shares = shares if self.weights is None else self.weights.to(shares)
            chosen = td.Categorical(shares).sample(lead + self.batch_shape)
            chosen = chosen.reshape(chosen.shape + (1,) * len(self.event_shape))
            for place, part in enumerate(self.parts[1:], 1):
                found = part.sample(lead).where(chosen == place, found)
        return found


@torch.no_grad()
def quantile(found: td.Distribution, level: float) -> Tensor:
    """Return what each number of a target is below with a probability, by bisection of its cdf.

    Args:
        found: a distribution of numbers, such as of `bnn.predictive(x)`.
        level: the probability, between 0 and 1.

    Raises:
        NotImplementedError: PyTorch has no cdf of the distribution, such as of a Student t, whose
            samples have quantiles.

    Example:
        >>> quantile(PredictiveMixture([td.Normal(0.0, 1.0), td.Normal(2.0, 1.0)]), 0.5).round()
        tensor(1.)
    """
    odds = (1 / check.number("level", level, above=0, below=1) - 1) ** 0.5
    # Cantelli's inequality bounds the quantiles of any distribution.
    low, high = found.mean - odds * found.stddev, found.mean + found.stddev / odds
    for _ in range(50):
        middle = (low + high) / 2
        below = _cdf_of_each(found, middle) < level
        low, high = middle.where(below, low), high.where(below, middle)
    return (low + high) / 2


def _cdf_of_each(found: Any, value: Tensor) -> Tensor:
    """Return the probability that each number of a target is below a value."""
    if isinstance(found, PredictiveMixture):
        return found._mean_of([_cdf_of_each(part, value) for part in found.parts])
    if isinstance(found, td.Independent):
        return _cdf_of_each(found.base_dist, value)
    if isinstance(found, td.MultivariateNormal):
        found = td.Normal(found.mean, found.stddev)
    try:
        below: Tensor = found.cdf(value)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"PyTorch has no cdf of a {name_of(found)}: take quantiles of samples instead, "
            "predictive.sample((4000,)).quantile(level, 0)"
        ) from error
    return below


def mixture(parts: Sequence[Any], weights: Tensor | None = None) -> Any:
    """Return the mixture of distributions; for those of one label, it is of the same kind.

    Distributions by name, as of a `Joint`, have a mixture each.
    """
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: mixture([part[name] for part in parts], weights) for name in first}
    if len(parts) == 1:
        return first
    if not isinstance(first, td.Categorical | td.Bernoulli):
        return PredictiveMixture(parts, weights)
    likelihood = Categorical() if isinstance(first, td.Categorical) else Bernoulli()
    logits = torch.stack([part.logits for part in parts])
    together = likelihood.aggregate_predictions(logits, 0, None, weights)
    return likelihood.predictive_distribution(together)


def distribution_at_draws(
    likelihood: Likelihood,
    outputs: Any,
    latents: Mapping[str, Tensor],
    weights: Tensor | None = None,
) -> Any:
    """Return the mixture over draws of outputs, `(S, n, ...)`, and the likelihood's variables."""
    if isinstance(likelihood, Joint):
        return {
            name: distribution_at_draws(
                likelihood._part(name), own, of_part(latents, name), weights
            )
            for name, own in likelihood.outputs_of(outputs).items()
        }
    draws = [{name: v[s] for name, v in latents.items()} for s in range(len(outputs))]
    each = zip(outputs, draws, strict=True)
    found = [likelihood._distribution_for(one, None, own)[0] for one, own in each]
    return mixture(found, weights)


@singledispatch
def gaussian_distribution(likelihood: Likelihood, outputs: GaussianOutputs) -> Any:
    """Return the distribution of targets for Gaussian outputs, by a grid or by samples of these.

    Register a likelihood that has a closed form here.
    """
    samples, weights = outputs.nodes()
    latents = outputs.options.latents_of(len(samples))
    found = distribution_at_draws(likelihood, samples, latents, weights)
    if weights is None or not isinstance(found, PredictiveMixture):
        return found
    is_count = type(likelihood) in (Poisson, NegativeBinomial)  # others may have another link
    moments = _moments_of_counts(likelihood, outputs) if is_count else None
    density = partial(_density_over_outputs, likelihood, outputs)
    return _Integrated(found.parts, weights, density, moments)


def _moments_of_counts(likelihood: Likelihood, outputs: GaussianOutputs) -> tuple[Tensor, Tensor]:
    """Return mean and variance of counts whose mean is log-normal.

    With `v` the variance of its log, its square has the mean `M^2 exp(v)`, which may come from
    further away than nodes are.
    """
    variance, dtype = precise(outputs.variance()), at_least_float32(outputs.mean).dtype
    at_mean = likelihood.predictive_distribution(precise(outputs.mean) + variance / 2)
    mean, dispersed = at_mean.mean, at_mean.variance - at_mean.mean
    total = mean + mean.square() * variance.expm1() + dispersed * variance.exp()
    total = total.where(~total.isnan() | mean.isnan(), math.inf)  # of numbers that overflow
    return mean.to(dtype), total.to(dtype)


class _Integrated(PredictiveMixture):
    """A mixture over nodes whose density is an integral over a finer grid.

    Its mean and variance may be given.
    """

    def __init__(
        self,
        parts: Any,
        weights: Tensor,
        log_density: Callable[[Tensor], Tensor],
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(parts, weights)
        self._log_density, self._moments = log_density, moments

    @property
    def mean(self) -> Tensor:
        return super().mean if self._moments is None else self._moments[0]

    @property
    def variance(self) -> Tensor:
        return super().variance if self._moments is None else self._moments[1]

    def log_prob(self, value: Tensor) -> Tensor:
        shape = self.batch_shape + self.event_shape
        return self._log_density(value.expand(torch.broadcast_shapes(value.shape, shape)))


def _density_over_outputs(
    likelihood: Likelihood, outputs: GaussianOutputs, values: Tensor
) -> Tensor:
    """Return the log-density of values `(..., n, ...)`, of one number for each point."""

    def at(value: Tensor, one: Tensor) -> Tensor:
        found: Tensor = likelihood._distribution_for(one, None)[0].log_prob(value)
        return found

    of_points = likelihood._distribution_for(outputs.mean, None)[0]
    shape = of_points.batch_shape + of_points.event_shape
    each = [outputs.log_mean(partial(at, value)) for value in values.reshape(-1, *shape)]
    lead = values.shape[: values.dim() - len(shape)]
    return torch.stack(each).view(*lead, *of_points.batch_shape)


@gaussian_distribution.register
def _(likelihood: Joint, outputs: GaussianOutputs) -> dict[str, Any]:
    parts = gaussian_parts(likelihood, outputs)
    return {name: gaussian_distribution(likelihood._part(name), own) for name, own in parts}


@gaussian_distribution.register
def _(likelihood: Censored, outputs: GaussianOutputs) -> Any:
    return gaussian_distribution(likelihood.base, outputs)


@gaussian_distribution.register
def _(likelihood: Categorical, outputs: GaussianOutputs) -> Any:
    return _by_link(likelihood, outputs)


@gaussian_distribution.register
def _(likelihood: Bernoulli, outputs: GaussianOutputs) -> Any:
    if needs_samples(outputs):
        return gaussian_distribution.dispatch(Likelihood)(likelihood, outputs)
    return _by_link(likelihood, outputs)


def _by_link(likelihood: Likelihood, outputs: GaussianOutputs) -> Any:
    mean, covariance, options = outputs
    found = predict_from_gaussian(likelihood, mean, covariance, **options._asdict())
    return likelihood._distribution_for(found, None)[0]


@gaussian_distribution.register
def _(likelihood: HomoskedasticGaussian, outputs: GaussianOutputs) -> Any:
    mean, covariance = at_least_float32((outputs.mean, outputs.covariance))
    noises, covariance = noises_of(likelihood, outputs), semi_definite(covariance)
    return mixture([over_points(normal_of_numbers(mean, covariance, one)) for one in noises])


def normal_of_numbers(mean: Tensor, covariance: Tensor, noise: Tensor) -> td.Distribution:
    """Return the Normal of targets, whose numbers along the last dimension may be tied.

    The covariance of their means is `semi_definite`.
    """
    if covariance.shape[-1] == 1:
        variance = covariance.reshape(mean.shape).to(mean) + noise.square()
        return td.Normal(mean, variance.sqrt(), validate_args=False)
    scale = noise.expand_as(mean)
    relative = relative_root(covariance, scale)
    root = scale.to(relative).unsqueeze(-1) * relative
    return td.MultivariateNormal(mean, scale_tril=root.to(mean.dtype), validate_args=False)


def over_points(found: td.Distribution) -> td.Distribution:
    """Return a distribution with one batch element for each point."""
    extra = len(found.batch_shape) - 1
    return td.Independent(found, extra, validate_args=False) if extra > 0 else found


# --- outputs that are means and scales of noise ---------------------------------------------------
# Given the outputs for scales, the targets of a point are Gaussian. What is left is an expectation
# over these outputs, at nodes that are the same for all points: Gauss-Hermite for one number, whose
# density has a finer grid.


# The mean of the squared scale has a relative error below 1e-7 if the output for the scale has a
# standard deviation of 3, and below 3e-4 if that is 10.
NUM_HERMITE = 64


def _nodes(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Return nodes `(K, size)` of mean 0 and covariance I, and their weights."""
    if size == 1:  # Golub & Welsch (1969)
        off = torch.arange(1, NUM_HERMITE, dtype=torch.float64, device="cpu").sqrt()
        nodes, vectors = torch.linalg.eigh(off.diag(1) + off.diag(-1))
        return nodes[:, None], vectors[0].square()
    half = max(count // 2, 4 * size)
    uniform = torch.quasirandom.SobolEngine(size, scramble=True, seed=0).draw(half).double()
    normal = torch.special.ndtri(torch.cat([uniform, 1 - uniform]))
    weights = torch.full((2 * half,), 0.5 / half, dtype=torch.float64, device="cpu")
    return torch.linalg.qr(normal).Q * (2 * half) ** 0.5, weights


def _tied(outputs: GaussianOutputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return `S`, `R` and `Cov(f) - S S^T` of `_given_scales`, in double precision."""
    covariance, size = precise(outputs.covariance), outputs.mean.shape[-1] // 2
    root = square_root(covariance[..., size:, size:])
    # Directions whose variance is the covariance's rounding are left out.
    rounding = torch.finfo(outputs.covariance.dtype).eps ** 0.5
    slope = covariance[..., :size, size:] @ torch.linalg.pinv(root, rtol=rounding).mT
    return slope, root, covariance[..., :size, :size] - slope @ slope.mT


def _given_scales(
    likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the targets are at each node of the outputs `s` for the scales.

    With `s = E[s] + R z` and `S = Cov(f, s) R^-T` it is the mean `E[f] + S z`, the covariance of
    means `Cov(f) - S S^T`, the scale of the noise and the weight of the node.
    """
    mean, size = at_least_float32(outputs.mean), outputs.mean.shape[-1] // 2
    slope, root, left = _tied(outputs)
    nodes, weights = (each.to(root) for each in _nodes(size, outputs.options.num_samples))
    moved = (torch.cat([slope, root], -2) @ nodes.mT).movedim(-1, 0)
    loc, noise = likelihood._split(mean + moved.to(mean))
    return loc, left.to(mean), noise, weights.to(mean)


def _has_one_scale(outputs: GaussianOutputs) -> bool:
    return outputs.mean.shape[-1] == 2


def _density_over_scales(
    likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs, targets: Tensor
) -> Tensor:
    """Return the log-density of one number at each position, of the targets' shape.

    It may be narrow in the output for the scale, where this is tied to the mean.
    """
    mean = at_least_float32(outputs.mean)
    slope, root, left = (part[..., 0, :].to(mean) for part in _tied(outputs))
    given = targets.to(mean), *mean.chunk(2, -1), slope, root, left.clamp_min(0)
    y, *outputs_for, slope, root, left = (v.flatten() for v in torch.broadcast_tensors(*given))

    def log_density(z: Tensor) -> Tensor:
        moved = torch.stack(outputs_for, -1) + torch.stack([slope, root], -1) * z.unsqueeze(-1)
        loc, noise = (part[:, 0] for part in likelihood._split(moved))
        scale = (left + noise.square()).sqrt()
        return td.Normal(loc, scale, validate_args=False).log_prob(y)

    return log_mean_over_normal(log_density, y).view(targets.shape)


@gaussian_prediction.register
def _(likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs) -> Tensor:
    # The moments need each output alone, and nodes have the moments of a Normal.
    mean, variance = at_least_float32(outputs.mean), at_least_float32(outputs.variance())
    nodes, weights = (each.to(mean) for each in _nodes(1, 1))
    far = variance.clamp_min(0).sqrt() * nodes.view(-1, *[1] * mean.dim())
    return likelihood.aggregate_predictions(mean + far, 0, None, weights)


@gaussian_log_likelihood.register
def _(
    likelihood: HeteroskedasticGaussian,
    outputs: GaussianOutputs,
    targets: Tensor | Targets,
    prediction: Any,
) -> Tensor:
    if _has_one_scale(outputs):
        counted = likelihood.observed(targets)
        kept = replace(counted, weights=None).counts_within()
        found = _density_over_scales(likelihood, outputs, counted.values)
        return (found if kept is None else found * kept.to(found)).flatten(1).sum(1)
    loc, covariance, noise, weights = _given_scales(likelihood, outputs)
    logs = log_mean_exp(log_normals(likelihood, targets, loc, covariance, noise), 0, weights)
    return logs.view(len(logs), -1).sum(1).to(loc.dtype)


@gaussian_distribution.register
def _(likelihood: HeteroskedasticGaussian, outputs: GaussianOutputs) -> td.Distribution:
    loc, covariance, noise, weights = _given_scales(likelihood, outputs)
    covariance, each = semi_definite(covariance), zip(loc, noise, strict=True)
    parts = [normal_of_numbers(mean, covariance, scale) for mean, scale in each]
    if not _has_one_scale(outputs):
        return over_points(PredictiveMixture(parts, weights))
    return over_points(
        _Integrated(parts, weights, partial(_density_over_scales, likelihood, outputs))
    )
