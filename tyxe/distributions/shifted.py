"""A density times a constant."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import constraints

__all__ = ["Shifted"]


class Shifted(dist.TorchDistribution):
    """A distribution whose log-density has a number added to it, per element of its batch.

    It is not normalised: an observed site with it carries a term of an objective besides its
    log-likelihood. Draws are the base's.

    Args:
        base_dist: the distribution.
        shift: what is added, nats, broadcasting with the batch shape.

    Example:
        >>> Shifted(dist.Normal(torch.zeros(2), 1.0), torch.tensor(1.0)).log_prob(torch.zeros(2))
        tensor([0.0811, 0.0811])
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(self, base_dist: td.Distribution, shift: Tensor) -> None:
        self.base_dist, self.shift = base_dist, shift
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:
        """Whether the base's draws carry gradients."""
        return self.base_dist.has_rsample

    @property
    def support(self) -> constraints.Constraint | None:
        """That of the base."""
        return self.base_dist.support

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw from the base."""
        return self.base_dist.sample(torch.Size(sample_shape))

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw from the base, with gradients."""
        return self.base_dist.rsample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the base's log-density plus the shift."""
        log_prob: Tensor = self.base_dist.log_prob(value) + self.shift
        return log_prob
