"""BNNs as most tests make them: standard Normal priors, small nets, and a mean-field guide."""

import functools
import itertools
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn

import tyxe

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
NOTHING = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_all=True)
HIDE_NORMS = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=[nn.BatchNorm1d])
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def mean_field(net: nn.Module, likelihood: Any, prior: Any = NORMAL, **options: Any) -> Any:
    """Return a `VariationalBNN` with an `AutoNormal`."""
    return tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal, **options)


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers between these widths, with a tanh after each but the last."""
    net = nn.Sequential()
    for inputs, outputs in itertools.pairwise(widths):
        net.extend([nn.Linear(inputs, outputs), nn.Tanh()])
    return net[:-1]


def two_layers(inputs: int, hidden: int, outputs: int, *between: nn.Module) -> nn.Sequential:
    """Return two linear layers with others between them, by default a tanh."""
    others = between or [nn.Tanh()]
    return nn.Sequential(nn.Linear(inputs, hidden), *others, nn.Linear(hidden, outputs))
