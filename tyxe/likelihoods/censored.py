"""Targets of which some are only known to lie in an interval."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints
from torch.special import log_ndtr

from tyxe import check
from tyxe.data import Targets
from tyxe.likelihoods.base import Latents, Likelihood, Predictions
from tyxe.likelihoods.joint import Joint
from tyxe.likelihoods.output_hessian import hessian_blocks, output_hessian
from tyxe.util import at_least_float32, name_of, without_events


class Censored(Likelihood):
    """Another likelihood of numbers, of which some are only known to lie in an interval.

    Targets are pairs `(n, ..., 2)` of a lower and an upper end, which `censored_targets` makes.
    Equal ends are a known number, `(-inf, u)` one of at most `u`, `(l, inf)` one of at least `l`.
    Their log-likelihoods are `log p(y)`, `log F(u)`, `log (1 - F(l))` and `log (F(u) - F(l))`.
    Predictions are those of the other likelihood, and draws from the posterior predictive
    distribution are uncensored numbers. Errors use the number in the interval that is nearest to
    the predicted mean.

    The Hessian of a censored target is smaller. The GGN needs one output for each target.

    Args:
        base: the likelihood of the numbers, continuous and with a cdf; see `log_tails`.

    Raises:
        TypeError: a likelihood of classes, counts or several outputs; in a GGN, a likelihood
            without exactly one output for each target.
        ValueError: a lower end above the upper one.

    Example:
        >>> from tyxe.likelihoods import HomoskedasticGaussian
        >>> likelihood = Censored(HomoskedasticGaussian(100, scale=1.0))
        >>> y = torch.tensor([[0.5, 0.5], [0.0, math.inf]])
        >>> likelihood.log_likelihood(torch.zeros(2), y)
        tensor([-1.0439, -0.6931])
    """

    is_zero_outside = takes_infinity = has_target_hessian = True
    shape_hint = "make them by censored_targets(values, left=, right=)"

    def __init__(self, base: Likelihood) -> None:
        is_other = isinstance(base, Joint | Censored) or getattr(base, "has_classes", False)
        check.one_of("base", base, () if is_other else Likelihood, "a likelihood of numbers")
        super().__init__(base._dataset_size, base.event_dim, base.prefix)
        self.base = base
        self.has_squared_errors = base.has_squared_errors
        self.prepares_outputs = base.prepares_outputs

    @property
    def bounded_outputs(self) -> str:
        return self.base.bounded_outputs

    def from_net(self, outputs: Any) -> Any:
        return self.base.from_net(outputs)

    def known(self, targets: Targets) -> Targets:
        return targets.masked_by_vectors()

    def targets_of(self, targets: Tensor) -> Tensor:
        """Return drawn numbers, which are known."""
        return targets[..., 0]

    def latent_priors(self) -> dict[str, td.Distribution]:
        return self.base.latent_priors()

    def check_predictions(self, predictions: Tensor) -> None:
        """Raise or warn if the net's output cannot parametrise the likelihood of the numbers."""
        self.base.check_predictions(predictions)

    @staticmethod
    def expected_range(support: Any) -> str:
        """Say which targets are possible."""
        return "expected pairs (lower, upper), the lower one at most the upper one"

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        """Return the distribution of the numbers themselves."""
        return self.base.predictive_distribution(predictions, latents)

    def distribution_of(self, distribution: Any, targets: Tensor) -> Any:
        pairs, dims = _Pairs(without_events(distribution)), len(distribution.event_shape)
        return dist.Independent(pairs, dims, validate_args=False) if dims else pairs

    def point_error(self, predictions: Predictions, targets: Tensor) -> Tensor:
        mean = self.base.predictive_distribution(predictions, self.prior_means()).mean
        lower, upper = targets.unbind(-1)
        return self.base.point_error(predictions, mean.clamp(lower, upper))

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Predictions:
        how = {} if weights is None else {"weights": weights}
        return self.base.aggregate_predictions(predictions, dim, latents, **how)

    def sample(
        self, predictions: Predictions, sample_shape: Any = (), latents: Latents = None
    ) -> Tensor:
        """Draw numbers, as pairs of equal ends, `sample_shape + (n, ..., 2)`."""
        drawn = self.base.sample(predictions, sample_shape, latents)
        return torch.stack([drawn, drawn], -1)

    def output_counts(self, targets: Tensor | Targets, outputs: Tensor) -> Tensor | None:
        found = self.observed(targets)
        return self.base.output_counts(replace(found, values=found.values[..., 0]), outputs)

    def hessian_counts(self, targets: Tensor | Targets, outputs: Tensor) -> Tensor:
        """Return the part of the base's output Hessians that is known, for each output."""
        counts, found = self.output_counts(targets, outputs), self.observed(targets)
        with torch.enable_grad():
            f = at_least_float32(outputs.detach()).requires_grad_()
            values = self.prepare_targets(f, found.values)
            distribution = _Pairs(without_events(self.predictive_distribution(f)))
            if distribution.batch_shape != f.shape:
                raise TypeError(
                    f"{type(self.base).__name__} has {tuple(f.shape)} outputs for targets "
                    f"{tuple(distribution.batch_shape)}: the GGN of censored targets needs one for "
                    "each; curvature='empirical' takes any"
                )
            (slope,) = torch.autograd.grad(
                distribution.log_prob(values).sum(), f, create_graph=True
            )
            (second,) = torch.autograd.grad(slope.sum(), f)
        shares = (-second).clamp_min(0) / hessian_blocks(self.base, f.detach()).reshape(f.shape)
        # A number that is known has the Fisher information, which is there for all likelihoods.
        shares = shares.where(values[..., 0] != values[..., 1], torch.ones_like(shares))
        return shares if counts is None else shares * counts


@output_hessian.register
def _(likelihood: Censored, predictions: Tensor, latents: Latents = None) -> Tensor:
    return hessian_blocks(likelihood.base, predictions, latents)


@check.arguments
def censored_targets(
    values: Tensor, *, left: Tensor | None = None, right: Tensor | None = None
) -> Tensor:
    """Return targets of `Censored`, `(n, ..., 2)`, for numbers, some of which are bounds.

    Args:
        values: `(n, ...)`, which may be NaN where they are missing.
        left: booleans of this shape: where the number is at most the value.
        right: where it is at least the value.

    Example:
        >>> censored_targets(torch.tensor([1.0, 5.0]), right=torch.tensor([False, True]))
        tensor([[1., 1.],
                [5., inf]])
    """
    ends = []
    for name, is_bound, end in (("left", left, -math.inf), ("right", right, math.inf)):
        if is_bound is not None:
            check.shape(name, is_bound, values.shape, ", that of values")
        ends.append(values if is_bound is None else values.masked_fill(is_bound, end))
    return torch.stack(ends, -1)


# --------------------------------------------------------------------------- distributions


@singledispatch
def log_tails(distribution: Any, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return `log F(v)` and `log (1 - F(v))` elementwise, precise in both tails.

    Without a registered formula this uses the `cdf`, whose tails round to 0. Register a formula if
    you have one.

    Raises:
        TypeError: the distribution has no cdf.

    Example:
        >>> log_tails(td.Normal(0.0, 1.0), torch.tensor([0.0, 20.0]))[1]
        tensor([  -0.6931, -203.9172])
    """
    try:
        below = distribution.cdf(value)
    except NotImplementedError:
        raise TypeError(
            f"{name_of(distribution)} has no cdf, which censored targets need: decorate a "
            "function (distribution, value) that returns log F and log (1 - F) with "
            "@tyxe.likelihoods.log_tails.register"
        ) from None
    tiny = torch.finfo(below.dtype).tiny
    return below.clamp_min(tiny).log(), (1 - below).clamp_min(tiny).log()


@log_tails.register
def _(distribution: td.Normal, value: Tensor) -> tuple[Tensor, Tensor]:
    z = (value - distribution.loc) / distribution.scale
    return log_ndtr(z), log_ndtr(-z)


@log_tails.register
def _(distribution: td.Exponential, value: Tensor) -> tuple[Tensor, Tensor]:
    survival = -distribution.rate * value.clamp_min(torch.finfo(value.dtype).tiny)
    return (-torch.expm1(survival)).log(), survival


@log_tails.register
def _(distribution: td.TransformedDistribution, value: Tensor) -> tuple[Tensor, Tensor]:
    if not all(transform.bijective for transform in distribution.transforms):
        found: tuple[Tensor, Tensor] = log_tails.dispatch(object)(distribution, value)
        return found
    sign: Any = 1
    for transform in reversed(distribution.transforms):
        value, sign = transform.inv(value), sign * transform.sign
    below, above = log_tails(distribution.base_dist, value)
    grows = torch.as_tensor(sign) > 0
    return below.where(grows, above), above.where(grows, below)


class _OrderedPairs(constraints.Constraint):
    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return value[..., 0] <= value[..., 1]


class _Pairs(dist.TorchDistribution):
    """Ends of intervals that hold a number from a distribution, which is elementwise."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = _OrderedPairs()

    def __init__(self, numbers: Any) -> None:
        if numbers.support is None or numbers.support.is_discrete:
            raise TypeError(f"{name_of(numbers)} is discrete; censored targets are not")
        self._numbers = numbers
        super().__init__(numbers.batch_shape, torch.Size([2]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return _Pairs(self._numbers.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        numbers = self._numbers
        inside = value.isfinite() & numbers.support.check(value)
        (lower, upper), (has_lower, has_upper) = value.unbind(-1), inside.unbind(-1)
        # Where there is no end another number stands for it, so that gradients are finite.
        center = numbers.mean.detach()
        low = lower.where(has_lower, upper.where(has_upper, center))
        high = upper.where(has_upper, low)
        (low_below, low_above), (high_below, high_above) = (
            log_tails(numbers, end) for end in (low, high)
        )
        found = _between(low, high, (low_below, low_above), (high_below, high_above), numbers)
        found = found.where(low < high, numbers.log_prob(low))
        found = found.where(has_upper, low_above).where(has_lower, high_below)
        found = found.where(has_lower | has_upper, torch.zeros_like(found))
        is_wrong = (lower > upper) | ((lower == upper) & ~has_lower)
        # Beyond what the support holds, an end excludes all numbers.
        is_wrong |= (~has_upper & (upper < center)) | (~has_lower & (lower > center))
        return found.masked_fill(is_wrong, -math.inf)


def _between(low: Tensor, high: Tensor, at_low: Any, at_high: Any, numbers: Any) -> Tensor:
    """Return `log (F(high) - F(low))` in the tail where it is precise; see `log_tails`."""
    is_upper = at_low[0] > math.log(0.5)
    larger = at_low[1].where(is_upper, at_high[0])
    smaller = at_high[1].where(is_upper, at_low[0])
    gap = (larger - smaller).nan_to_num(nan=math.inf)  # where both are minus infinity
    # Where the difference is of rounding, the interval is narrow: the density times its width.
    is_narrow = gap < torch.finfo(gap.dtype).eps ** (1 / 3)
    safe = gap.where(~is_narrow, torch.ones_like(gap))
    wide = larger + (-torch.expm1(-safe)).log()
    width = (high - low).where(high > low, torch.ones_like(low))
    narrow = numbers.log_prob((low + high) / 2) + width.log()
    return narrow.where(is_narrow, wide)
