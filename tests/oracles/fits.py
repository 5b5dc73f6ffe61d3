"""Data and a net of a regression, and what a fit leaves of them."""

import functools

import pyro
import pyro.distributions as dist
import torch
from torch import nn

import tyxe
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical

SEED = torch.Generator().manual_seed(0)
X = torch.randn(10, 2, generator=SEED)
Y = torch.randint(0, 3, (10,), generator=SEED)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
HIDE_NORMS = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])


def make(net=None, prior=None, guide=AutoNormal, likelihood=None, seed=0):
    pyro.set_rng_seed(seed)
    # A bias before a norm has no gradient but rounding errors, of which Adam makes whole steps.
    first = nn.Linear(2, 4, bias=False)
    net = net or nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return tyxe.VariationalBNN(net, prior or HIDE_NORMS, likelihood or Categorical(10), guide)


def trainable(bnn):
    return {n: p.detach().clone() for n, p in bnn.named_parameters() if p.requires_grad}


def fitted(optim, epochs=3, **options):
    """The parameters after a fit from the same start and seed."""
    bnn = make()
    pyro.set_rng_seed(7)
    bnn.fit([(X[:6], Y[:6]), (X[6:], Y[6:])], optim(bnn), epochs, **options)
    return trainable(bnn)


def assert_equal(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name
        )


def minimise(parameters, loss, **options):
    """Follow a loss without noise to its minimum."""
    optimizer = torch.optim.LBFGS(
        list(parameters), tolerance_change=0.0, line_search_fn="strong_wolfe", **options
    )

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
