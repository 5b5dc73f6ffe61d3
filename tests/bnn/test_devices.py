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
    with pytest.raises(torch.OutOfMemoryError, match="smaller batch_size"):
        bnn.predict(X)


def test_a_curvature_without_memory_says_smaller_batches():
    bnn = laplace(Hungry(2, 1))
    bnn.fit_curvature(BATCHES)
    state = bnn.state
    bnn.net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match="smaller batches"):
        bnn.fit_curvature(BATCHES)
    assert bnn.state is state


@pytest.mark.parametrize("make", [variational, laplace])
def test_a_device_that_is_not_there(make):
    bnn = make(nn.Linear(2, 1))
    before = values(bnn)
    for device, error in (("cuda:77", (AssertionError, RuntimeError)), (3.5, TypeError)):
        with pytest.raises(error):  # PyTorch's, of its build and of the machine
            bnn.fit(BATCHES, ADAM, 1, device=device)
    assert all(map(torch.equal, values(bnn), before))


def test_a_bnn_that_is_moved_during_a_fit():
    bnn = variational(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="was on cpu when the fit began, and is on meta"):
        bnn.fit(BATCHES, ADAM, 2, lambda bnn, epoch, loss: bnn.to("meta") and None)
