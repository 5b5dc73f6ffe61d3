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
    """A distribution that couples sites: its event holds the values of all of them.

    As a posterior, a guide yields it from `joints`; in the guide's program it is an auxiliary
    variable, and each of its sites a delta at the part of the draw that is its own. As a prior, a
    `DictPrior` has its marginals; in the prior's program each site is a `JointPart`. The ELBO asks
    `torch.distributions.kl_divergence` for the KL between two of them, or between one and a
    `SiteProduct`; register it, else it is estimated at the draw.

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
        ...     def join(self, values):
        ...         return values[self.names[0]]
        ...     def marginal_log_prob(self, name, value):
        ...         return self.log_prob(value)
        >>> q = Twins(("net.0.bias", "net.1.bias"), torch.Size([1]))
        >>> q.name, q.marginal("net.1.bias").variance
        ('joint(net.0.bias, net.1.bias)', tensor([1.]))
    """

    def __init__(self, names: tuple[str, ...], event_shape: torch.Size) -> None:
        self.names = names
        self._site_shapes: dict[str, torch.Size] | None = None
        super().__init__(torch.Size(), event_shape, validate_args=False)

    @property
    def name(self) -> str:
        """The name of the auxiliary variable."""
        return f"joint({', '.join(self.names)})"

    @property
    def site_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the sites' values, by name."""
        if self._site_shapes is None:
            parts = self.separate(torch.empty(self.event_shape, device="meta"))
            self._site_shapes = {name: part.shape for name, part in parts.items()}
        return self._site_shapes

    @abstractmethod
    def separate(self, value: Tensor) -> dict[str, Tensor]:
        """Return the values of the sites of a value `(..., *event_shape)`, by name."""

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the value `event_shape` whose sites' values are given: what `separate` undoes.

        Raises:
            NotImplementedError: a subclass has none; a prior needs it.
        """
        raise NotImplementedError(f"to be a prior, {type(self).__name__} has to implement join")

    @abstractmethod
    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone."""

    def marginal_icdf(self, name: str, value: Tensor) -> Tensor:
        """Return quantiles of one site's elements; where a subclass has none, guides sample."""
        raise NotImplementedError

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
        super().__init__(torch.Size(), joint.site_shapes[site], validate_args=False)

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
    """Independent distributions of several sites, on either side of a KL with a joint one.

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
