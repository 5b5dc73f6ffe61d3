"""Nets that are run again in the backward: which forward's draws they meet."""

import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.bnn.test_rerun import PRIOR, Adjoint, Flow, X, Y, net, steps
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


def test_a_draw_of_a_later_forward_is_not_taken_for_that_of_a_solver_around_the_bnn():
    bnn = tyxe.PytorchBNN(nn.Linear(3, 3), PRIOR, AutoNormal)
    x = X.clone().requires_grad_()
    out = bnn(Adjoint.apply(bnn, x, *[p for p in bnn.parameters() if p.requires_grad]))
    with pytest.raises(RuntimeError, match="run again in the backward"):
        out.sum().backward()


class WithInput(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@dataclass(slots=True)
class Output:
    values: object


class Wrapped(Flow):
    def forward(self, x):
        return Output(SimpleNamespace(parts=[super().forward(x)]))


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


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
def test_a_net_that_returns_an_object(how: str):
    def gradients(how: str):
        torch.manual_seed(0)
        bnn = tyxe.PytorchBNN(Wrapped(how), PRIOR, AutoNormal)
        pyro.set_rng_seed(1)
        bnn(X).values.parts[0].square().sum().backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    for found, expected in zip(gradients(how), gradients("plain"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class ElsewhereAdjoint(Adjoint):
    @staticmethod
    def backward(ctx, gradient):
        """Run in another of the engine's threads than what came before, as on several devices."""
        found, task = [], torch._C._current_graph_task_id()

        def work() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch._C, "_current_graph_task_id", lambda: task)
                leaf = X.clone().requires_grad_()
                with torch.enable_grad():
                    out = steps(ctx.field, leaf)
            found.append(torch.autograd.grad(out, (leaf, *ctx.saved_tensors[1:]), gradient))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return None, *found[0]


class Elsewhere(Flow):
    def forward(self, x):
        return self.head(ElsewhereAdjoint.apply(self.field, x, *self.field.parameters()))


def test_a_backward_whose_parts_run_in_several_threads():
    def gradients(cls, how: str):
        torch.manual_seed(0)
        bnn = tyxe.PytorchBNN(cls(how), PRIOR, AutoNormal)
        pyro.set_rng_seed(1)
        bnn(X).square().sum().backward()
        return [p.grad for p in bnn.parameters() if p.requires_grad]

    found = gradients(Elsewhere, "adjoint")
    for one, expected in zip(found, gradients(Flow, "plain"), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
