"""A BNN as most tests make it: a standard Normal prior, and a mean-field guide."""

from typing import Any

import pyro.distributions as dist
from torch import nn

import tyxe

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def mean_field(net: nn.Module, likelihood: Any, prior: Any = NORMAL, **options: Any) -> Any:
    """Return a `VariationalBNN` with an `AutoNormal`."""
    return tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal, **options)
