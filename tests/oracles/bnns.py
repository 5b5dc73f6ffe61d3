"""BNNs as most tests make them: standard Normal priors, small nets, and short fits."""

import copy
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


def plain(net: nn.Module, likelihood: Any, **options: Any) -> Any:
    """Return a `VariationalBNN` without any site."""
    return tyxe.VariationalBNN(net, NOTHING, likelihood, **options)


def laplace(
    net: nn.Module, likelihood: Any, data: Any = None, prior: Any = NORMAL, **options: Any
) -> Any:
    """Return a `LaplaceBNN`, with its curvature if data are given."""
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, **options)
    if data is not None:
        bnn.fit_curvature(data)
    return bnn


FIXED = {"adapt_step_size": False, "adapt_mass_matrix": False}
STILL = tyxe.samplers.HMC(step_size=0.01, num_steps=2, **FIXED)


def chains(
    net: nn.Module, likelihood: Any, kernel: Any = STILL, prior: Any = NORMAL, **options: Any
) -> Any:
    """Return an `MCMC_BNN`, by default with two small steps of HMC that adapt nothing."""
    return tyxe.MCMC_BNN(net, prior, likelihood, kernel, **options)


def swag(net: nn.Module, likelihood: Any, prior: Any = NORMAL, **options: Any) -> Any:
    """Return a `SWAG_BNN` of rank 2."""
    return tyxe.SWAG_BNN(net, prior, likelihood, rank=2, **options)


def dropout(net: nn.Module, likelihood: Any, **options: Any) -> Any:
    """Return a `DropoutBNN` that drops half of its inputs."""
    return tyxe.DropoutBNN(nn.Sequential(nn.Dropout(0.5), net), likelihood, **options)


def ensemble(net: nn.Module, likelihood: Any, count: int = 2, **options: Any) -> Any:
    """Return an ensemble of mean fields that each start anew."""

    def member(_: int) -> Any:
        return mean_field(tyxe.util.reset_parameters_(copy.deepcopy(net)), likelihood, **options)

    return tyxe.EnsembleBNN(member, count)


# By name, each a function of a net and a likelihood.
KINDS = {kind.__name__: kind for kind in (mean_field, laplace, chains, swag, dropout, ensemble)}


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
