"""A joint prior in a Pyro program, which samples sites one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tyxe.distributions.joint import JointDistribution, JointMarginal

__all__ = ["JointPart"]


class JointPart(JointMarginal):
    """One site of a joint prior, given the sites that the program has sampled before.

    All sites of one run of the program take their parts of one draw. The log-density of the last
    one is that of all sites together, and that of the others zero: right in sum, whatever values
    a handler puts in the draws' places.

    Args:
        joint: the prior over several sites.
        site: one of its names.
        draw: returns one draw, the same for all sites of a run.
        earlier: the values of those sampled before, by name.

    Raises:
        ValueError: the prior has no such site.

    Example:
        >>> from tyxe.distributions import JointNormal, PlainGroup
        >>> from tyxe.linalg import Dense
        >>> groups = [PlainGroup("a", torch.Size([])), PlainGroup("b", torch.Size([]))]
        >>> coupled = Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> joint = JointNormal(groups, torch.zeros(2), coupled)
        >>> zero = torch.zeros(())
        >>> first = JointPart(joint, "a", joint.sample, {})
        >>> last = JointPart(joint, "b", joint.sample, {"a": zero})
        >>> first.log_prob(zero), last.log_prob(zero) == joint.log_prob(torch.zeros(2))
        (tensor(0.), tensor(True))
    """

    def __init__(
        self,
        joint: JointDistribution,
        site: str,
        draw: Callable[[], Tensor],
        earlier: Mapping[str, Tensor],
    ) -> None:
        super().__init__(joint, site)
        self.draw, self.earlier = draw, dict(earlier)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Return this site's part of the run's draw; further draws are of the site alone."""
        if tuple(sample_shape):
            return super().rsample(sample_shape)
        return self.joint.separate(self.draw())[self.site]

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of all sites, if this is the last, else zero."""
        values = {**self.earlier, self.site: value}
        if len(values) < len(self.joint.names):
            return torch.zeros((), dtype=value.dtype, device=value.device)
        return self.joint.log_prob(self.joint.join(values))

    def icdf(self, value: Tensor) -> Tensor:
        """Return quantiles of the site's elements, where the joint distribution has them."""
        return self.joint.marginal_icdf(self.site, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the marginal: the run is over."""
        return JointMarginal, (self.joint, self.site)
