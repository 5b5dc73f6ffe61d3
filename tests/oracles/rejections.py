"""A BNN to make mistakes with, and what tells whether a mistake has changed it."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian

N = 8
X, Y = torch.randn(N, 2), torch.randn(N, 1)
LABELS = torch.arange(N) % 3
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
LIKELIHOOD = HomoskedasticGaussian(N, scale=0.5)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def make(module=None, prior=PRIOR, likelihood=None, guide=AutoNormal):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=0.5)
    return tyxe.VariationalBNN(module or net(), prior, likelihood, guide)


def snapshot(bnn):
    tensors = {n: v.clone() for n, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    modes = [module.training for module in bnn.modules()]
    places = {n: id(p) for n, p in bnn.net.named_parameters()}
    return tensors, modes, places, torch.get_rng_state()


def assert_unchanged(bnn, before):
    tensors, modes, places, rng = before
    state = {n: v for n, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    assert state.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    assert [module.training for module in bnn.modules()] == modes
    assert {n: id(p) for n, p in bnn.net.named_parameters()} == places
    assert torch.equal(torch.get_rng_state(), rng)
    assert len(pyro.get_param_store()) == 0


def rejects(bnn, error, message, call, draws=False):
    """Expect an error that changes nothing; with `draws`, random numbers may have been drawn."""
    before = snapshot(bnn)
    with pytest.raises(error, match=message) as caught:
        call()
    rng = torch.get_rng_state() if draws else before[-1]
    assert_unchanged(bnn, (*before[:-1], rng))
    return caught.value
