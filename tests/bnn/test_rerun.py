"""Nets that are run again in the backward, against the same nets that are run once."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tyxe
from tyxe.guides import AutoNormal
from tyxe.priors import IIDPrior

PRIOR = IIDPrior(dist.Normal(0, 1))
X, Y = torch.randn(6, 3), torch.randn(6, 3)


class Adjoint(torch.autograd.Function):
    """Three Euler steps whose gradient is found by running them again, as adjoint solvers do."""

    @staticmethod
    def forward(ctx, field, x, *parameters):
        ctx.field = field
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return steps(field, x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = steps(ctx.field, leaf)
            found = torch.autograd.grad(out, (leaf, *parameters), gradient)
        return None, *found


def steps(field, x):
    for _ in range(3):
        x = x + 0.3 * field(x)
    return x


class Flow(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.head = nn.Linear(3, 3)
        self.how = how

    def forward(self, x):
        if self.how == "adjoint":
            x = Adjoint.apply(self.field, x, *self.field.parameters())
        elif self.how == "plain":
            x = steps(self.field, x)
        else:
            x = checkpoint(partial(steps, self.field), x, use_reentrant=False)
        return self.head(x)


def net(how: str) -> Flow:
    torch.manual_seed(0)
    return Flow(how)


def gradients_of_pytorch_bnn(how: str) -> dict[str, torch.Tensor]:
    start = tyxe.guides.PretrainedInitializer.from_net(net("plain"))
    bnn = tyxe.PytorchBNN(net(how), PRIOR, partial(AutoNormal, init_loc_fn=start, init_scale=0.1))
    pyro.set_rng_seed(1)
    (bnn(X) - Y).square().sum().backward()
    return {name: p.grad for name, p in bnn.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_a_module_that_draws_has_the_gradients_of_one_run(how: str):
    expected, found = gradients_of_pytorch_bnn("plain"), gradients_of_pytorch_bnn(how)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_a_held_draw_has_the_gradients_of_one_run(how: str):
    def gradients(how: str):
        start = tyxe.guides.PretrainedInitializer.from_net(net("plain"))
        guide = partial(AutoNormal, init_loc_fn=start, init_scale=0.1)
        bnn = tyxe.PytorchBNN(net(how), PRIOR, guide)
        pyro.set_rng_seed(1)
        pairs = zip(X.split(2), Y.split(2), strict=True)
        with bnn.hold_sample():
            loss = sum((bnn(x) - y).square().sum() for x, y in pairs)
        loss.backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_two_forwards_before_one_backward(how: str):
    """Each backward meets the draws of its own forward."""

    def gradients(how: str):
        start = tyxe.guides.PretrainedInitializer.from_net(net("plain"))
        guide = partial(AutoNormal, init_loc_fn=start, init_scale=0.1)
        bnn = tyxe.PytorchBNN(net(how), PRIOR, guide)
        pyro.set_rng_seed(1)
        first, second = bnn(X), bnn(2 * X)
        (first - Y).square().sum().backward()
        (second - Y).square().sum().backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_a_fit_is_that_of_one_run(how: str):
    def fitted(how: str):
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
        bnn = tyxe.VariationalBNN(net(how), PRIOR, likelihood, partial(AutoNormal, init_scale=0.1))
        pyro.set_rng_seed(1)
        bnn.fit([(X, Y)], partial(torch.optim.Adam, lr=1e-2), 3)
        return [p.detach() for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(fitted(how), fitted("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_around_the_bnn_draws_the_same_again():
    def gradients(checkpointed: bool):
        bnn = tyxe.PytorchBNN(net("plain"), PRIOR, AutoNormal)
        pyro.set_rng_seed(1)
        out = checkpoint(bnn, X, use_reentrant=False) if checkpointed else bnn(X)
        (out - Y).square().sum().backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_bnn_inside_of_an_adjoint_names_the_cause():
    bnn = tyxe.PytorchBNN(nn.Linear(3, 3), PRIOR, AutoNormal)
    x = X.clone().requires_grad_()
    out = Adjoint.apply(bnn, x, *[p for p in bnn.parameters() if p.requires_grad])
    with pytest.raises(RuntimeError, match="run again in the backward"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_a_reentrant_checkpoint_names_the_one_that_works():
    class Reentrant(Flow):
        def forward(self, x):
            x = x.clone().requires_grad_()
            return self.head(checkpoint(partial(steps, self.field), x, use_reentrant=True))

    bnn = tyxe.PytorchBNN(Reentrant("plain"), PRIOR, AutoNormal)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        bnn(X).square().sum().backward()
