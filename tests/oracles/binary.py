"""Classifiers with binary weights."""

import functools

import pyro
import torch
import torch.nn as nn

import tyxe
from tyxe.bnn import elbo_terms
from tyxe.distributions import SignedBernoulli
from tyxe.guides import AutoBernoulli
from tyxe.poutine import local_reparameterization
from tyxe.priors import BinaryPrior

ADAM = functools.partial(torch.optim.Adam, lr=0.05)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


class Noise:
    """A program of one variable that belongs to no net."""

    prefix = "likelihood."

    def __call__(self):
        return {"likelihood.sign": pyro.sample("likelihood.sign", SignedBernoulli(0.0))}


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights(**options):
    return BinaryPrior(expose_parameters=["weight"], hide_module_types=[nn.BatchNorm1d], **options)


def make(prior=None, guide=AutoBernoulli, net=None, likelihood=None):
    return tyxe.VariationalBNN(
        net or mlp(), prior or weights(), likelihood or tyxe.likelihoods.Categorical(30), guide
    )


def data():
    return torch.randn(30, 4).double(), torch.randint(3, (30,))


def fit(bnn, epochs=2, **options):
    with local_reparameterization():
        return bnn.fit([data()], ADAM, epochs, **options)


def disturb_(bnn):
    with torch.no_grad():
        for parameter in bnn.net_guide.parameters():
            parameter.add_(torch.randn_like(parameter))
    return bnn


def states_differ(bnn, before):
    return [name for name, value in bnn.state_dict().items() if not same(value, before[name])]


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def kl_of(bnn):
    with torch.no_grad():
        return elbo_terms(bnn.model, bnn.guide, *data()).kl.item()
