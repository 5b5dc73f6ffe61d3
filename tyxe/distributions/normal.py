"""Independent elements: moments by registration, and Normals in few passes over a whole tensor.

Handlers that replace a draw by moments call these functions. Draws of a distribution that is not
registered are used as they are.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import constraints

from tyxe import check
from tyxe.distributions.joint import OneEvent
from tyxe.util import at_least_float32


@singledispatch
def independent_moments(distribution: td.Distribution) -> tuple[Tensor, Tensor] | None:
    """Return elementwise `(mean, variance)` where sums of many elements are Gaussian, else None.

    Register a type for which `sum_i x_i w_i` may be replaced by the Gaussian of the same two
    moments: exactly for independent Normals, by the central limit theorem for others.

    Args:
        distribution: the posterior of one site, whose event shape is that of the weight.

    Example:
        >>> import torch
        >>> q = td.Independent(td.Normal(torch.zeros(2), torch.full((2,), 3.0)), 1)
        >>> independent_moments(q)
        (tensor([0., 0.]), tensor([9., 9.]))
    """
    return None


@independent_moments.register(td.Independent)
def _(distribution: td.Independent[td.Distribution]) -> tuple[Tensor, Tensor] | None:
    return independent_moments(distribution.base_dist)


@independent_moments.register
def _(distribution: td.Normal) -> tuple[Tensor, Tensor]:
    # The square of a small scale underflows in half precision.
    return distribution.loc, at_least_float32(distribution.scale).square()


@singledispatch
def center(distribution: td.Distribution) -> Tensor | None:
    """Return the centre about which independent elements are symmetric, or None.

    Flipout needs it: to flip the sign of `w - center` at random does not change the marginal
    distribution of an element.

    Example:
        >>> import torch
        >>> center(td.Laplace(torch.ones(2), torch.ones(2)))
        tensor([1., 1.])
    """
    return None


@center.register(td.Independent)
def _(distribution: td.Independent[td.Distribution]) -> Tensor | None:
    return center(distribution.base_dist)


@center.register(td.Normal)
@center.register(td.Laplace)
@center.register(td.StudentT)
@center.register(td.Cauchy)
def _(distribution: td.Normal | td.Laplace | td.StudentT | td.Cauchy) -> Tensor:
    return distribution.loc


@center.register
def _(distribution: td.Uniform) -> Tensor:
    return (distribution.low + distribution.high) / 2


@singledispatch
def deviation(distribution: td.Distribution) -> Tensor:
    """Draw `w - center`, for a distribution with a centre.

    Register a type that can draw it more cheaply than as a difference.

    Example:
        >>> import torch
        >>> deviation(td.Normal(torch.ones(2), torch.ones(2))).shape
        torch.Size([2])
    """
    check.one_of("distribution", distribution, td.Distribution, "a distribution")
    middle: Any = center(distribution)
    draw = distribution.rsample if distribution.has_rsample else distribution.sample
    return draw() - middle


@singledispatch
def known_entropy(distribution: td.Distribution) -> Tensor | None:
    """Return the closed-form entropy of a posterior whose cross-entropy is to be sampled, or None.

    Register a posterior without a closed-form KL: only the other term of its KL is then estimated.

    Example:
        >>> import torch
        >>> known_entropy(td.Normal(torch.zeros(()), torch.ones(()))) is None
        True
    """
    return None


class FactorizedNormal(dist.Independent):
    """`prod_i N(w_i; loc_i, exp(log_scale_i)^2)` as one event.

    Other code can use it as an `Independent(Normal)`. Scale and variance are computed once, when
    they are first used; a draw takes one pass, and the KL needs no logarithm.

    Args:
        loc: means, of any shape.
        log_scale: logarithms of the standard deviations, of that shape.

    Example:
        >>> q = FactorizedNormal(torch.zeros(3), torch.zeros(3))
        >>> q.event_shape, q.rsample().shape
        (torch.Size([3]), torch.Size([3]))
    """

    has_rsample = True
    # Validation would compute the scale.
    _validate_args = False

    def __init__(self, loc: Tensor, log_scale: Tensor) -> None:
        # Not the constructor of Independent, which needs the scale.
        td.Distribution.__init__(self, torch.Size(), loc.shape, validate_args=False)
        self.reinterpreted_batch_ndims = loc.dim()
        # What is made without gradients has none, so that its scale is computed once too.
        both = (loc, log_scale) if torch.is_grad_enabled() else (loc.detach(), log_scale.detach())
        self.loc, self.log_scale = both
        self._scale: Tensor | None = None
        self._variance: Tensor | None = None

    @property
    def base_dist(self) -> dist.Normal:
        """The Normals, as a batch."""
        return dist.Normal(self.loc, self.scale, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, self.reinterpreted_batch_ndims)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def scale(self) -> Tensor:
        """Elementwise standard deviation."""
        if self._scale is not None:
            return self._scale
        scale = self.log_scale.exp()
        if self._has_all_gradients(scale):
            self._scale = scale
        return scale

    @property
    def variance(self) -> Tensor:
        if self._variance is not None:
            return self._variance
        # The square of a small scale underflows in half precision.
        log_scale = at_least_float32(self.log_scale)
        variance = (log_scale + log_scale).exp_()
        if self._has_all_gradients(variance):
            self._variance = variance
        return variance

    def _has_all_gradients(self, formed: Tensor) -> bool:
        # A tensor computed under no_grad must not be cached where gradients are needed.
        return formed.requires_grad or not self.log_scale.requires_grad

    def scale_or_variance(self) -> tuple[Tensor, bool]:
        """Return the one of scale and variance that is known, and whether it is the variance."""
        if self._scale is None and self._variance is not None:
            return self._variance, True
        return self.scale, False

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        loc = self.loc
        noise = torch.randn(
            torch.Size(sample_shape) + loc.shape, dtype=loc.dtype, device=loc.device
        )
        return torch.addcmul(loc, self.scale, noise)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> dist.Independent:
        """Copy as an ordinary `Independent(Normal)`."""
        normal = dist.Normal(self.loc.clone(), self.scale.clone(), validate_args=False)
        return normal.to_event(self.reinterpreted_batch_ndims)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> dist.Independent:
        return dist.Independent(self.base_dist, self.reinterpreted_batch_ndims).expand(batch_shape)


class PrunedNormal(OneEvent):
    """A factorised Normal whose pruned elements are zero, and left out of densities and KLs.

    Args:
        base: the Normal before pruning.
        kept: boolean, of its shape: the elements that are not pruned.

    Example:
        >>> base = FactorizedNormal(torch.ones(2), torch.zeros(2))
        >>> PrunedNormal(base, torch.tensor([True, False])).variance
        tensor([1., 0.])
    """

    def __init__(self, base: FactorizedNormal, kept: Tensor) -> None:
        self.base, self.kept = base, kept
        super().__init__(torch.Size(), base.event_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.base.loc * self.kept

    @property
    def variance(self) -> Tensor:
        return self.base.variance * self.kept

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        draw: Tensor = self.base.rsample(sample_shape)
        return draw * self.kept

    def log_prob(self, value: Tensor) -> Tensor:
        logs = self.base.base_dist.log_prob(value) * self.kept
        return logs.flatten(-self.kept.dim()).sum(-1) if self.kept.dim() else logs

    def __deepcopy__(self, memo: dict[int, Any]) -> PrunedNormal:
        base = FactorizedNormal(self.base.loc.clone(), self.base.log_scale.clone())
        return PrunedNormal(base, self.kept.clone())


class Point(dist.Delta):
    """One value, as one event, whose draws are the tensor itself and whose log-density is 0."""

    def __init__(self, v: Tensor) -> None:
        super().__init__(v, event_dim=v.dim())

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return super().rsample(torch.Size(sample_shape)) if sample_shape else self.v

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> dist.Delta:
        return dist.Delta(self.v, event_dim=self.event_dim).expand(batch_shape)


@singledispatch
def as_gaussian(distribution: Any) -> Any:
    """Return the Normals of a site whose elements are independent Normals, else None.

    What is returned has `loc`, `scale` and `variance` of the site's shape. Register a distribution
    of yours that is one, and closed forms of Gaussians apply to it.

    Example:
        >>> as_gaussian(td.Independent(td.Normal(torch.zeros(2), torch.ones(2)), 1)).loc
        tensor([0., 0.])
        >>> as_gaussian(td.Laplace(0.0, 1.0)) is None
        True
    """
    return None


def gaussian_event(distribution: Any, event_dim: int | None = None) -> td.Distribution | None:
    """Return `as_gaussian` with its event dimensions, or so many, of which KLs are known."""
    normal = as_gaussian(distribution)
    if normal is None:
        return None
    dims = len(distribution.event_shape) if event_dim is None else event_dim
    return td.Independent(td.Normal(normal.loc, normal.scale), dims)


@as_gaussian.register
def _(distribution: td.Normal) -> td.Normal:
    return distribution


@as_gaussian.register(td.Independent)
def _(distribution: td.Independent[td.Distribution]) -> Any:
    return as_gaussian(distribution.base_dist)


@as_gaussian.register
def _(distribution: FactorizedNormal) -> FactorizedNormal:
    return distribution


@independent_moments.register
def _(distribution: FactorizedNormal) -> tuple[Tensor, Tensor]:
    return distribution.loc, distribution.variance


@deviation.register
def _(distribution: FactorizedNormal) -> Tensor:
    scale = distribution.scale
    return scale * torch.randn_like(scale)


@center.register
def _(distribution: FactorizedNormal) -> Tensor:
    return distribution.loc


@independent_moments.register
def _(distribution: PrunedNormal) -> tuple[Tensor, Tensor]:
    return distribution.mean, distribution.variance


@center.register
def _(distribution: PrunedNormal) -> Tensor:
    return distribution.mean
