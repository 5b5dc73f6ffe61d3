"""Distributions over several sites, such as weight and bias of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints

from tyxe import check


class OneEvent(dist.TorchDistribution):
    """Base of distributions over real values that are one event, without batch dimensions."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real
    has_rsample = True

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> OneEvent:
        if tuple(batch_shape):
            raise NotImplementedError(f"{type(self).__name__} is one joint event")
        return self


class JointDistribution(OneEvent, ABC):
    """A distribution that couples sites: its event holds the values of all of them.

    A guide returns its joint posteriors from `joints`; its program samples each as an auxiliary
    variable, and every site of it as a delta at the site's part of that draw. For a joint prior,
    a `DictPrior` has its marginals; the prior's program samples each site from a `JointSite`. The
    ELBO calls `torch.distributions.kl_divergence` for the KL between two of them, or between one
    and `IndependentSites`: without a registered KL it is estimated at the draw.

    Args:
        names: of its sites, in the joint model.
        event_shape: the shape of its own values.

    Example:
        A Normal over two sites that are always equal:

        >>> class Twins(JointDistribution):
        ...     mean, variance = torch.zeros(1), torch.ones(1)
        ...     def rsample(self, sample_shape=()):
        ...         return torch.randn(*sample_shape, 1)
        ...     def log_prob(self, value):
        ...         return td.Normal(0.0, 1.0).log_prob(value).sum(-1)
        ...     def unflatten(self, value):
        ...         return {name: value for name in self.names}
        ...     def flatten(self, values):
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
            parts = self.unflatten(torch.empty(self.event_shape, device="meta"))
            self._site_shapes = {name: part.shape for name, part in parts.items()}
        return self._site_shapes

    @abstractmethod
    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        """Return the sites' values of a value `(..., *event_shape)`, by name."""

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the value `event_shape` of the sites' values, the inverse of `unflatten`.

        Raises:
            NotImplementedError: the subclass does not implement it; a prior needs it.
        """
        raise NotImplementedError(f"to be a prior, {type(self).__name__} has to implement flatten")

    @abstractmethod
    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone."""

    def marginal(self, name: str) -> JointMarginal:
        """Return the distribution of one site."""
        return JointMarginal(self, name)


class JointMarginal(OneEvent):
    """The distribution of one site of a joint distribution.

    Args:
        joint: the distribution over several sites.
        site: one of its names.

    Raises:
        ValueError: it has no such site.
    """

    def __init__(self, joint: JointDistribution, site: str) -> None:
        if not isinstance(site, str) or site not in joint.site_shapes:
            check.choice("site", site, joint.site_shapes)  # which names those that there are
        self.joint, self.site = joint, site
        super().__init__(torch.Size(), joint.site_shapes[site], validate_args=False)

    def _own(self, value: Tensor) -> Tensor:
        return self.joint.unflatten(value)[self.site]

    @property
    def mean(self) -> Tensor:
        return self._own(self.joint.mean)

    @property
    def variance(self) -> Tensor:
        return self._own(self.joint.variance)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return self._own(self.joint.rsample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, with the other sites integrated out."""
        return self.joint.marginal_log_prob(self.site, value)


class JointSite(JointMarginal):
    """One site of a joint prior, given the `earlier` values of sites that the program has sampled.

    In one run of the program all sites take their parts of one `draw`. The log-density of the last
    one is that of all sites together, and that of the others is zero, so that their sum is right
    for any values, also for those that a handler has replaced.
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
        """Return this site's part of the run's draw; with a sample shape, marginal draws."""
        if tuple(sample_shape):
            return super().rsample(sample_shape)
        return self.joint.unflatten(self.draw())[self.site]

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of all sites if this is the last one, else zero."""
        values = {**self.earlier, self.site: value}
        if len(values) < len(self.joint.names):
            return torch.zeros((), dtype=value.dtype, device=value.device)
        return self.joint.log_prob(self.joint.flatten(values))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the marginal, because the other values belong to one run of the program."""
        return JointMarginal, (self.joint, self.site)


class IndependentSites(td.Distribution):
    """Independent distributions of several sites, for a KL from or to a joint distribution.

    Args:
        distributions: by the sites' names in the joint model.

    Example:
        >>> p = IndependentSites({"net.bias": dist.Normal(torch.zeros(2), 1.0).to_event(1)})
        >>> list(p.distributions)
        ['net.bias']
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    @check.arguments
    def __init__(self, distributions: Mapping[str, td.Distribution]) -> None:
        self.distributions = dict(distributions)
        super().__init__(validate_args=False)
