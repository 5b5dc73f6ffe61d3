"""Independent Normals with some elements fixed at zero."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor

from tyxe.distributions.joint import OneEvent
from tyxe.distributions.moments import center, independent_moments
from tyxe.distributions.normal import FactorizedNormal
from tyxe.util import at_least_float32


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


@independent_moments.register
def _(distribution: PrunedNormal) -> tuple[Tensor, Tensor]:
    return distribution.mean, distribution.variance


@center.register
def _(distribution: PrunedNormal) -> Tensor:
    return distribution.mean


@td.register_kl(PrunedNormal, dist.Independent)
def _kl_pruned_independent(q: PrunedNormal, p: dist.Independent) -> Tensor:
    r"""Return `sum_kept 1/2 [(sigma^2 + (mu - m)^2)/s^2 - 1] + log s - log sigma` [VL 11]."""
    normal = p.base_dist
    if not isinstance(normal, td.Normal) or p.batch_shape or p.event_shape != q.event_shape:
        raise NotImplementedError
    loc, scale = normal.loc, at_least_float32(normal.scale)
    quadratic = ((at_least_float32(q.base.loc) - loc).square() + q.base.variance) / scale.square()
    each = (quadratic - 1) / 2 + scale.log() - at_least_float32(q.base.log_scale)
    return (each * q.kept).sum()
