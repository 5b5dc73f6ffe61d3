"""BNNs with inducing weights on nets of two layers."""

import functools
import io

import pyro.distributions as dist
import torch
from torch import nn

import tyxe
from tyxe.guides import AutoInducing
from tyxe.priors import IIDPrior
from tyxe.priors.sites import SitePriors

STANDARD = IIDPrior(dist.Normal(0.0, 1.0))
FAMILIES = ["diagonal", "full", "matrix", "ensemble"]
SMALL = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
# Scales at which finite differences resolve what the small starts would hide.
WIDE = {"init_residual": 0.3, "init_lambda": 0.3}


def program(net, prior=STANDARD):
    return SitePriors(prior.sites(net), net)


def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def wide_net():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))


def make(builder, net=None, prior=STANDARD, size=10):
    net = mlp().double() if net is None else net
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(size, scale=0.5)
    return tyxe.VariationalBNN(net, prior, likelihood, builder)


def build(**keywords):
    return functools.partial(AutoInducing, **{**SMALL, **WIDE, **keywords})


def data(n=10, inputs=2, outputs=1):
    return torch.randn(n, inputs).double(), torch.randn(n, outputs).double()


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
