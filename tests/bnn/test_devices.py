"""Devices that are not there, are left in a fit, or run out of memory."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe

ADAM = partial(torch.optim.Adam, lr=1e-2)
X, Y = torch.randn(8, 2), torch.randn(8, 1)
BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]
FIXED = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))


class Hungry(nn.Linear):
    """A net that has no memory for some of its forwards."""

    left = 1000

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nGPU 0 has less")
        return super().forward(x)


def variational(net):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.5)
    return tyxe.VariationalBNN(net, PRIOR, likelihood, tyxe.guides.AutoNormal)


def laplace(net):
    return tyxe.LaplaceBNN(net, PRIOR, tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.5))


def values(bnn):
    return [p.detach().clone() for p in bnn.parameters()]


def test_a_fit_without_memory_is_as_before_the_step():
    bnn = variational(Hungry(2, 1))
    bnn.fit(BATCHES, ADAM, 1)
    before = values(bnn)
    bnn.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match=r"accumulate_steps.*2\.00 GiB"):
        bnn.fit(BATCHES, ADAM, 1)
    assert all(map(torch.equal, values(bnn), before))


def test_predictions_without_memory_say_batch_size():
    bnn = variational(Hungry(2, 1))
    bnn.predict(X)
    bnn.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match="smaller batch_size, or vectorize=False"):
        bnn.predict(X)


def test_a_curvature_without_memory_says_smaller_batches():
    bnn = laplace(Hungry(2, 1))
    bnn.fit_curvature(BATCHES)
    state = bnn.state
    bnn.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match="smaller batches"):
        bnn.fit_curvature(BATCHES)
    assert bnn.state is state
    with pytest.raises(torch.OutOfMemoryError, match="pass fewer points"):
        bnn.functional_variance(X)


def test_chains_and_members_without_memory_say_what_helps():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.5)
    chains = tyxe.MCMC_BNN(Hungry(2, 1), PRIOR, likelihood, FIXED)
    chains.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match="chains: take fewer"):
        chains.fit(BATCHES, 1, warmup_steps=0)
    ensemble = tyxe.EnsembleBNN(lambda _: variational(Hungry(2, 1)), 2)
    for member in ensemble.members:
        member.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match=r"at once.*leave vectorize out"):
        ensemble.fit(BATCHES, ADAM, 1, vectorize=True)


@pytest.mark.parametrize("make", [variational, laplace])
def test_a_device_that_is_not_there(make):
    bnn = make(nn.Linear(2, 1))
    before = values(bnn)
    for device, error in (("cuda:77", (AssertionError, RuntimeError)), (3.5, TypeError)):
        with pytest.raises(error):  # PyTorch's, of its build and of the machine
            bnn.fit(BATCHES, ADAM, 1, device=device)
    assert all(map(torch.equal, values(bnn), before))


class Moved(tyxe.Callback):
    def on_batch(self, bnn, *_):
        bnn.to("meta")


@pytest.mark.parametrize("callback", [Moved(), lambda bnn, epoch, loss: bnn.to("meta") and None])
def test_a_bnn_that_is_moved_during_a_fit(callback):
    bnn = variational(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="was on cpu when the fit began, and is on meta"):
        bnn.fit(BATCHES, ADAM, 2, callback)
