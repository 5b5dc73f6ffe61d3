"""Independent Normals over a whole tensor, without the passes over it that nobody needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor

from tyxe.distributions.moments import deviation, independent_moments

__all__ = ["FactorizedNormal", "factorized_normal_kl", "log_density"]


class FactorizedNormal(dist.Independent):
    """`prod_i N(w_i; loc_i, scale_i^2)` as one event, which knows the log of its scale.

    It is an ordinary `Independent(Normal)` to everybody else. Here the square of the scale is
    formed once, draws take one pass, and the KL needs no logarithm.

    Args:
        loc: means, of any shape.
        scale: standard deviations, of that shape.
        log_scale: their logarithm.

    Example:
        >>> q = FactorizedNormal(torch.zeros(3), torch.ones(3), torch.zeros(3))
        >>> q.event_shape, q.rsample().shape
        (torch.Size([3]), torch.Size([3]))
    """

    def __init__(self, loc: Tensor, scale: Tensor, log_scale: Tensor) -> None:
        normal = dist.Normal(loc, scale, validate_args=False)
        super().__init__(normal, loc.dim(), validate_args=False)
        self.log_scale = log_scale
        self._variance: Tensor | None = None

    @property
    def variance(self) -> Tensor:
        """Elementwise variance."""
        if self._variance is not None:
            return self._variance
        scale = self.base_dist.scale
        # The square of a small scale underflows in half precision.
        variance = scale.to(torch.promote_types(scale.dtype, torch.float32)).square()
        if variance.requires_grad or not scale.requires_grad:
            self._variance = variance
        return variance

    def sum_of_variances(self) -> Tensor:
        """Return the sum of all variances, without forming them if nobody else has."""
        if self._variance is not None:
            return self._variance.sum()
        return _sum_of_squares(self.base_dist.scale)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw with gradients."""
        loc, scale = self.base_dist.loc, self.base_dist.scale
        noise = torch.randn(
            torch.Size(sample_shape) + loc.shape, dtype=loc.dtype, device=loc.device
        )
        return torch.addcmul(loc, scale, noise)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> dist.Independent:
        """Copy as an ordinary `Independent(Normal)`, which stores two tensors and not four."""
        base = self.base_dist
        normal = dist.Normal(base.loc.clone(), base.scale.clone(), validate_args=False)
        return normal.to_event(self.reinterpreted_batch_ndims)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> dist.Independent:
        """Return independent copies."""
        return dist.Independent(self.base_dist, self.reinterpreted_batch_ndims).expand(batch_shape)


def _scalar(tensor: Tensor) -> Tensor | None:
    """The one number that a tensor repeats without storing it again, or None."""
    if tensor.dim() == 0:
        return tensor
    if any(stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return None
    return tensor[(0,) * tensor.dim()] if tensor.numel() else None


class _SumOfSquares(torch.autograd.Function):
    """`sum x^2` in one pass, with a gradient in one pass (and twice differentiable)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        return torch.dot(flat, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * (2 * grad)


def _sum_of_squares(x: Tensor) -> Tensor:
    return _SumOfSquares.apply(x)


def factorized_normal_kl(q: FactorizedNormal, loc: Tensor, scale: Tensor) -> Tensor:
    r"""Return the KL from a factorised Normal to another, summed over elements, in nats.

    `sum 1/2 [(sigma^2 + (mu - m)^2)/s^2 - 1] + log s - log sigma` [VL 11].

    Args:
        q: the first.
        loc: means `m` of the second, of `q`'s shape.
        scale: standard deviations `s` of the second.

    Example:
        >>> q = FactorizedNormal(torch.ones(2), torch.ones(2), torch.zeros(2))
        >>> factorized_normal_kl(q, torch.zeros(2), torch.ones(2))
        tensor(1.)
    """
    mean, count = q.base_dist.loc, q.base_dist.loc.numel()
    one_scale, one_loc = _scalar(scale), _scalar(loc)
    if one_scale is not None and one_loc is not None:
        spread = _sum_of_squares(mean - one_loc) + q.sum_of_variances()
        quadratic = spread / one_scale.square()
        log_ratio = count * one_scale.log() - q.log_scale.sum()
    else:
        quadratic = (((mean - loc).square() + q.variance) / scale.square()).sum()
        log_ratio = scale.log().sum() - q.log_scale.sum()
    return (quadratic - count) / 2 + log_ratio


def log_density(distribution: td.Distribution) -> Callable[[Tensor], Tensor]:
    """Return a distribution's log-density as a function, constants and all, computed once.

    For Normals that repeat one mean and one scale it takes two passes; for others it is
    `log_prob`, summed.

    Example:
        >>> prior = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        >>> log_density(prior)(torch.zeros(2))
        tensor(-1.8379)
    """
    base = distribution.base_dist if isinstance(distribution, td.Independent) else distribution
    if isinstance(base, td.Normal):
        loc, scale = _scalar(base.loc), _scalar(base.scale)
        if loc is not None and scale is not None:
            constant = base.loc.numel() * (scale.log() + 0.5 * math.log(2 * math.pi))
            weight = 0.5 / scale.square()
            return lambda value: -weight * _sum_of_squares(value - loc) - constant
    return lambda value: distribution.log_prob(value).sum()


@independent_moments.register
def _(distribution: FactorizedNormal) -> tuple[Tensor, Tensor]:
    return distribution.base_dist.loc, distribution.variance


@deviation.register
def _(distribution: FactorizedNormal) -> Tensor:
    scale = distribution.base_dist.scale
    return scale * torch.randn_like(scale)


@td.register_kl(FactorizedNormal, dist.Independent)
def _kl_factorized_independent(q: FactorizedNormal, p: dist.Independent) -> Tensor:
    if isinstance(p.base_dist, td.Normal) and p.event_shape == q.event_shape and not p.batch_shape:
        return factorized_normal_kl(q, p.base_dist.loc, p.base_dist.scale)
    plain = dist.Independent(q.base_dist, q.reinterpreted_batch_ndims, validate_args=False)
    return td.kl_divergence(plain, p)
