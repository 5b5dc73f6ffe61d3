"""One distribution for every weight."""

from __future__ import annotations

from typing import Any

import torch.distributions as td
from torch import nn

from tyxe.priors.base import Prior


class IIDPrior(Prior):
    """The same scalar distribution, independently for every weight.

    Selection rules are those of `Prior`.

    Args:
        distribution: a distribution over scalars, such as `dist.Normal(0, 1)`.

    Raises:
        TypeError: not a distribution.
        ValueError: not over scalars.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
        >>> sites = prior.sites(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> {name: tuple(site.event_shape) for name, site in sites.items()}
        {'0.weight': (8, 3, 3, 3), '0.bias': (8,)}
    """

    def __init__(
        self,
        distribution: td.Distribution,
        expose_all: bool = True,
        hide_all: bool = False,
        **rules: Any,
    ) -> None:
        super().__init__(expose_all, hide_all, **rules)
        if not isinstance(distribution, td.Distribution):
            raise TypeError(
                f"distribution is {distribution!r}; expected one such as dist.Normal(0, 1)"
            )
        if distribution.batch_shape or distribution.event_shape:
            shape = tuple(distribution.batch_shape + distribution.event_shape)
            raise ValueError(
                f"distribution has shape {shape}; IIDPrior takes one over scalars. For a "
                "distribution per parameter use DictPrior or LambdaPrior"
            )
        self.distribution = distribution

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self.distribution.expand(param.shape)
