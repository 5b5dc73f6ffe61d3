"""A BNN as most tests make it: a standard Normal prior, and a mean-field guide."""

import itertools
from typing import Any

import pyro.distributions as dist
from torch import nn

import tyxe

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
NOTHING = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_all=True)


def mean_field(net: nn.Module, likelihood: Any, prior: Any = NORMAL, **options: Any) -> Any:
    """Return a `VariationalBNN` with an `AutoNormal`."""
    return tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal, **options)


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers between these widths, with a tanh after each but the last."""
    net = nn.Sequential()
    for inputs, outputs in itertools.pairwise(widths):
        net.extend([nn.Linear(inputs, outputs), nn.Tanh()])
    return net[:-1]
