"""Nets that are run again in the backward: which forward's draws they meet."""

from functools import partial

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.bnn.test_rerun import PRIOR, X, Y, net
from tyxe.bnn.elbo import elbo_terms
from tyxe.guides import AutoNormal


def in_chunks(bnn) -> None:
    with bnn.hold_sample():
        for x in X.split(2):
            bnn(x).square().sum().backward(retain_graph=True)


def kept_graph(bnn) -> None:
    loss = bnn(X).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def then_the_kl(bnn) -> None:
    bnn(X).square().sum().backward(retain_graph=True)
    bnn.cached_kl_loss.backward()


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
@pytest.mark.parametrize("backwards", [in_chunks, kept_graph, then_the_kl])
def test_several_backwards_through_one_draw(how: str, backwards):
    def gradients(how: str):
        start = tyxe.guides.PretrainedInitializer.from_net(net("plain"))
        guide = partial(AutoNormal, init_loc_fn=start, init_scale=0.1)
        bnn = tyxe.PytorchBNN(net(how), PRIOR, guide)
        pyro.set_rng_seed(1)
        backwards(bnn)
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def loss_of_elbo(bnn) -> torch.Tensor:
    return -elbo_terms(bnn.model, bnn.guide, X, Y).data


def loss_of_forward(bnn) -> torch.Tensor:
    return (bnn(X) - Y).square().sum()


def loss_of_guided_forward(bnn) -> torch.Tensor:
    return (bnn.guided_forward(X) - Y).square().sum()


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
@pytest.mark.parametrize("loss", [loss_of_elbo, loss_of_forward, loss_of_guided_forward])
def test_a_loss_of_ones_own_has_the_gradients_of_one_run(how: str, loss):
    def gradients(how: str):
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
        guide = partial(AutoNormal, init_scale=0.1)
        bnn = tyxe.VariationalBNN(net(how), PRIOR, likelihood, guide)
        pyro.set_rng_seed(1)
        loss(bnn).backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class WithInput(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_a_net_that_returns_what_another_bnn_has_returned(how: str):
    def gradients(how: str):
        torch.manual_seed(0)
        first = tyxe.PytorchBNN(net(how), PRIOR, AutoNormal)
        second = tyxe.PytorchBNN(WithInput(3, 3), PRIOR, AutoNormal)
        pyro.set_rng_seed(1)
        output, between = second(first(X))
        (output.square().sum() + between.square().sum()).backward()
        return [p.grad for bnn in (first, second) for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
