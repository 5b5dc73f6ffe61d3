"""One distribution over several sites, such as weight and bias of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

__all__ = ["JointDistribution", "JointMarginal", "SiteProduct"]


class _OneEvent(dist.TorchDistribution):
    """Base of distributions over real values that are one event each."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real
    has_rsample = True

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> _OneEvent:
        """Return the distribution itself; it has no batch dimensions to expand."""
        if tuple(batch_shape):
            raise NotImplementedError(f"{type(self).__name__} is one joint event")
        return self


class JointDistribution(_OneEvent, ABC):
    """A posterior that couples sites: its event holds the values of all of them.

    A guide yields it from `joints`; in the guide's program it is an auxiliary variable, and each of
    its sites a delta at the part of the draw that is its own. The ELBO asks
    `torch.distributions.kl_divergence` for its KL from a `SiteProduct`; register it, else it is
    estimated at the draw.

    Args:
        names: of its sites, in the joint model.
        event_shape: of its own values.

    Example:
        A Normal over two sites that are always equal:

        >>> class Twins(JointDistribution):
        ...     mean, variance = torch.zeros(1), torch.ones(1)
        ...     def rsample(self, sample_shape=()):
        ...         return torch.randn(*sample_shape, 1)
        ...     def log_prob(self, value):
        ...         return td.Normal(0.0, 1.0).log_prob(value).sum(-1)
        ...     def separate(self, value):
        ...         return {name: value for name in self.names}
        ...     def marginal_log_prob(self, name, value):
        ...         return self.log_prob(value)
        >>> q = Twins(("net.0.bias", "net.1.bias"), torch.Size([1]))
        >>> q.name, q.marginal("net.1.bias").variance
        ('joint(net.0.bias, net.1.bias)', tensor([1.]))
    """

    def __init__(self, names: tuple[str, ...], event_shape: torch.Size) -> None:
        self.names = names
        super().__init__(torch.Size(), event_shape, validate_args=False)

    @property
    def name(self) -> str:
        """The name of the auxiliary variable."""
        return f"joint({', '.join(self.names)})"

    @abstractmethod
    def separate(self, value: Tensor) -> dict[str, Tensor]:
        """Return the values of the sites of a value `(..., *event_shape)`, by name."""

    @abstractmethod
    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone."""

    def marginal(self, name: str) -> JointMarginal:
        """Return the distribution of one site."""
        return JointMarginal(self, name)


class JointMarginal(_OneEvent):
    """The distribution of one site of a joint posterior.

    Args:
        joint: the posterior over several sites.
        site: one of its names.

    Raises:
        ValueError: it has no such site.
    """

    def __init__(self, joint: JointDistribution, site: str) -> None:
        if site not in joint.names:
            raise ValueError(f"there is no site {site!r}; the sites are {', '.join(joint.names)}")
        self.joint, self.site = joint, site
        outline = self._own(torch.empty(joint.event_shape, device="meta"))
        super().__init__(torch.Size(), outline.shape, validate_args=False)

    def _own(self, value: Tensor) -> Tensor:
        return self.joint.separate(value)[self.site]

    @property
    def mean(self) -> Tensor:
        """Elementwise mean."""
        return self._own(self.joint.mean)

    @property
    def variance(self) -> Tensor:
        """Elementwise variance."""
        return self._own(self.joint.variance)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw all sites, and return this one."""
        return self._own(self.joint.rsample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, the other sites integrated out."""
        return self.joint.marginal_log_prob(self.site, value)


class SiteProduct(td.Distribution):
    """Independent distributions of several sites: what a joint posterior's KL is taken from.

    Args:
        priors: by the sites' names in the joint model.

    Example:
        >>> p = SiteProduct({"net.bias": dist.Normal(torch.zeros(2), 1.0).to_event(1)})
        >>> p.log_prob_of({"net.bias": torch.zeros(2)})
        tensor(-1.8379)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, priors: Mapping[str, td.Distribution]) -> None:
        self.priors = dict(priors)
        super().__init__(validate_args=False)

    def log_prob_of(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of the sites' log-densities."""
        terms = [prior.log_prob(values[name]).sum() for name, prior in self.priors.items()]
        return torch.stack(terms).sum()
