"""Nets that are run again in the backward meet their own draws, as nets that are run once."""

import _thread
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pyro
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.bnns import ADAM, NORMAL
from tyxe.bnn.elbo import elbo_terms
from tyxe.guides import AutoNormal
from tyxe.threads import handlers

X, Y = torch.randn(6, 3), torch.randn(6, 3)
HANDLERS = [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout]


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


def start_of(module: nn.Module, scale: float = 0.1) -> Any:
    """Return a guide that starts at the weights of a net."""
    start = tyxe.guides.PretrainedInitializer.from_net(module)
    return partial(AutoNormal, init_loc_fn=start, init_scale=scale)


def pytorch(how: str, scale: float = 0.1) -> tyxe.PytorchBNN:
    return tyxe.PytorchBNN(net(how), NORMAL, start_of(net("plain"), scale))


def of_net(module: nn.Module) -> tyxe.VariationalBNN:
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
    return tyxe.VariationalBNN(module, NORMAL, likelihood, partial(AutoNormal, init_scale=0.1))


def gradients(bnn: nn.Module, run: Callable[[Any], object]) -> list[torch.Tensor | None]:
    """Return the gradients that a function of a BNN leaves, from a seed."""
    pyro.set_rng_seed(1)
    run(bnn)
    return [p.grad for p in bnn.parameters() if p.requires_grad]


def assert_same(found: list[Any], expected: list[Any], rtol: float = 1e-4, atol: float = 1e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def squares(bnn: Any) -> None:
    (bnn(X) - Y).square().sum().backward()


def in_chunks(bnn: Any) -> None:
    with bnn.hold_sample():
        for x in X.split(2):
            bnn(x).square().sum().backward(retain_graph=True)


def kept_graph(bnn: Any) -> None:
    loss = bnn(X).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def then_the_kl(bnn: Any) -> None:
    bnn(X).square().sum().backward(retain_graph=True)
    bnn.cached_kl_loss.backward()


def two_forwards(bnn: Any) -> None:
    """Each backward meets the draws of its own forward."""
    first, second = bnn(X), bnn(2 * X)
    (first - Y).square().sum().backward()
    (second - Y).square().sum().backward()


MODULES = [squares, in_chunks, kept_graph, then_the_kl, two_forwards]


@pytest.mark.parametrize("how", ["adjoint", "checkpoint"])
@pytest.mark.parametrize("run", MODULES)
def test_a_module_that_draws_has_the_gradients_of_one_run(how: str, run: Callable[[Any], object]):
    expected = gradients(pytorch("plain"), run)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    assert_same(gradients(pytorch(how), run), expected)


def elbo(bnn: Any) -> None:
    (-elbo_terms(bnn.model, bnn.guide, X, Y).data).backward()


def guided_forward(bnn: Any) -> None:
    (bnn.guided_forward(X) - Y).square().sum().backward()


@pytest.mark.parametrize("handler", [nullcontext, *HANDLERS])
def test_particles_of_a_checkpointed_net_meet_each_its_own_draws(handler):
    found, sgd = [], partial(torch.optim.SGD, lr=0.1)
    for how in ("plain", "checkpoint"):
        bnn = of_net(net(how))
        pyro.set_rng_seed(1)
        with handler():
            loss = bnn.fit([(X, Y)], sgd, 3, num_particles=2).loss
        found.append([torch.tensor(loss), *(p.detach() for p in bnn.parameters())])
    assert_same(*found)


class Field(nn.Linear):
    def forward(self, t, x):
        return super().forward(x).tanh()


class Solved(nn.Module):
    """A solver of torchdiffeq and a head.

    The two solvers agree to their own errors, which reach 1e-6 where they ask for 1e-9 a step.
    """

    def __init__(self, solve):
        super().__init__()
        torch.manual_seed(0)
        self.field, self.head, self.solve = Field(3, 3), nn.Linear(3, 3), solve

    def forward(self, x):
        x, times = x.double(), torch.tensor([0.0, 1.0]).double()
        return self.head(self.solve(self.field, x, times, rtol=1e-12, atol=1e-12)[-1])


@pytest.mark.parametrize("run", [elbo, squares, guided_forward])
def test_torchdiffeqs_adjoint_has_the_gradients_of_its_solver(run: Callable[[Any], object]):
    torchdiffeq = pytest.importorskip("torchdiffeq", reason="torchdiffeq is not installed")
    solvers = torchdiffeq.odeint, torchdiffeq.odeint_adjoint
    expected, found = (gradients(of_net(Solved(solve).double()), run) for solve in solvers)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    assert_same(found, expected, 1e-6, 1e-8)


def test_a_checkpoint_around_the_bnn_draws_the_same_again():
    def checkpointed(bnn: Any) -> None:
        (checkpoint(bnn, X, use_reentrant=False) - Y).square().sum().backward()

    found = (gradients(pytorch("plain"), run) for run in (checkpointed, squares))
    assert_same(*found)


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_bnn_inside_of_an_adjoint_names_the_cause(is_followed: bool):
    """The draw of a later forward is not taken for that of a solver around the BNN."""
    bnn = tyxe.PytorchBNN(nn.Linear(3, 3), NORMAL, AutoNormal)
    x = X.clone().requires_grad_()
    out = Adjoint.apply(bnn, x, *[p for p in bnn.parameters() if p.requires_grad])
    out = bnn(out) if is_followed else out
    with pytest.raises(RuntimeError, match="run again in the backward"):
        out.sum().backward()


class Reentrant(Flow):
    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.head(checkpoint(partial(steps, self.field), x, use_reentrant=True))


def sites_of_one_vector(model):
    return pyro.infer.autoguide.AutoDiagonalNormal(model, init_scale=0.1)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("guide", [partial(AutoNormal, init_scale=0.1), sites_of_one_vector])
@pytest.mark.parametrize("handler", [nullcontext, *HANDLERS])
def test_a_reentrant_checkpoint_is_right_or_pytorchs_error(guide, handler):
    """Its backward within the backward goes through the draws, and the outer one through the KL."""

    def of(kind: type[Flow], has_kl: bool) -> list[Any]:
        torch.manual_seed(0)
        bnn = tyxe.PytorchBNN(kind("plain"), NORMAL, guide)

        def run(bnn: Any) -> None:
            with handler():
                output = bnn(X)
            (output.square().sum() + (bnn.cached_kl_loss if has_kl else 0.0)).backward()

        return gradients(bnn, run)

    with pytest.raises(RuntimeError, match=r"second time|use_reentrant=False"):
        of(Reentrant, True)
    if guide is not sites_of_one_vector and handler is nullcontext:
        assert_same(of(Reentrant, False), of(Flow, False))


def backward_in_another_thread(loss: torch.Tensor) -> None:
    """Do as CUDA does, whose backwards run in threads of the engine."""
    done: list[object] = []

    def work() -> None:
        try:
            done.append(loss.backward())
        except BaseException as error:
            done.append(error)

    _thread.start_new_thread(work, ())
    while not done:
        time.sleep(1e-3)
    assert done == [None]


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("where", ["inside", "after", "in another thread"])
def test_handlers_of_the_forward_act_when_the_net_is_run_again(handler, where: str):
    def run(bnn: Any) -> None:
        with handler():
            loss = (bnn(X) - Y).square().sum()
            if where == "inside":
                loss.backward()
            elif where == "in another thread":
                backward_in_another_thread(loss)
        if where == "after":
            loss.backward()
        assert not handlers()

    expected = gradients(pytorch("plain", 0.3), handler()(squares))
    assert_same(gradients(pytorch("checkpoint", 0.3), run), expected)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", HANDLERS)
def test_noise_that_would_be_drawn_anew_is_refused(handler):
    """An adjoint solver does not set the generator back: its gradient would be another's."""
    bnn, module = of_net(net("adjoint")), pytorch("adjoint")
    with handler():
        with pytest.raises(RuntimeError, match=f"{handler.__name__} draws other noise"):
            bnn.fit([(X, Y)], partial(torch.optim.SGD, lr=1e-3), 1)
        with pytest.raises(RuntimeError, match=f"{handler.__name__} draws other noise"):
            module(X).sum().backward()


class Times(torch.autograd.Function):
    """A product with a derivative of its own, as fused operations have."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return None, (gradient * x).sum(0)


class Scaled(nn.Linear):
    def forward(self, x):
        return Times.apply(super().forward(x), self.bias)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_gradient_that_would_be_lost_is_refused(handler):
    bnn = tyxe.PytorchBNN(Scaled(3, 3), NORMAL, AutoNormal)
    with handler():
        loss = bnn(X).sum()
    with pytest.raises(RuntimeError, match=r"net\.bias as a lazy draw"):
        loss.backward()


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", HANDLERS)
def test_a_gradient_that_nobody_needs_is_not_refused(handler):
    guide = partial(AutoNormal, train_loc=False, train_scale=False)
    bnn, x = tyxe.PytorchBNN(Scaled(3, 3), NORMAL, guide), X.clone().requires_grad_()
    with handler():
        bnn(x).sum().backward()
    assert x.grad is None
    assert all(p.grad is None for p in bnn.parameters())


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_held_draw_that_is_first_used_without_gradients_has_them(first):
    bnn, found = pytorch("plain", 0.3), []
    for before in (nullcontext, first):
        bnn.zero_grad()
        pyro.set_rng_seed(1)
        with bnn.hold_sample():
            with before():
                early = bnn(X)
            numbers = torch.get_rng_state()
            output = bnn(X)
            assert torch.equal(torch.get_rng_state(), numbers)
            (output.square().sum() + bnn.cached_kl_loss).backward()
            late = bnn(X)
        gradients = [p.grad.clone() for p in bnn.parameters() if p.requires_grad]
        found.append([early, output, late, *gradients])
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][0], found[0][2])


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning", "ignore:None of the inputs")
def test_a_reentrant_checkpoint_in_a_fit_names_the_one_that_works():
    bnn = of_net(Reentrant("plain"))
    before = [p.clone() for p in bnn.parameters()]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        bnn.fit([(X, Y)], ADAM, 1)
    assert all(map(torch.equal, bnn.parameters(), before))


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_a_graph_that_a_net_keeps_is_no_reentrant_checkpoint():
    class Stateful(Flow):
        def forward(self, x):
            self.state = getattr(self, "state", 0.0) + self.head(x).mean()
            return self.head(x) + self.state

    bnn = of_net(Stateful("plain"))
    with pytest.raises(RuntimeError, match="second time"):
        bnn.fit([(X, Y)], ADAM, 3)
