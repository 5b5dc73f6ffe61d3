"""The compiled potential of a chain: the same numbers, and nets that it cannot follow."""

import functools

import pytest
import torch
from pyro.infer.mcmc import HMC
from torch import nn

from tests.oracles.chains import data, fitted_chain, make
from tyxe.bnn.compiled import CompiledFunction


class Forward(nn.Linear):
    """A linear layer, with something before it that a subclass fills in."""

    def __init__(self):
        super().__init__(1, 1)
        self.calls = 0


class BranchesOnValues(Forward):
    def forward(self, x):
        out = super().forward(x)
        return out if out.sum() > 0 else 2 * out


class DrawsNoise(Forward):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class ChoosesRows(Forward):
    def forward(self, x):
        out = super().forward(x)
        return out + out[out > out.mean()].mean()


class Counts(Forward):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (BranchesOnValues, "cannot follow this net"),
        (DrawsNoise, "nondeterministic_seeded"),
        (ChoosesRows, "dynamic_output_shape"),
        (Counts, "gives another potential than this net"),
    ],
)
def test_nets_that_a_program_cannot_follow_are_refused(net, message):
    bnn = make(functools.partial(HMC, num_steps=2), net=net().double())
    with pytest.raises(RuntimeError, match=message):
        bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True, compile=True)


def test_what_needs_the_model_is_not_compiled():
    bnn = make(lambda model: HMC(model))
    with pytest.raises(ValueError, match="compile=True needs priors that are distributions"):
        bnn.fit([data()], 2, warmup_steps=1, disable_progbar=True, compile=True)
    start = {"net.weight": torch.zeros(1, 1).double(), "net.bias": torch.zeros(1).double()}
    with pytest.raises(ValueError, match="leave compile or initial_params"):
        make(HMC).fit([data()], 2, initial_params=start, disable_progbar=True, compile=True)


def test_a_compiled_function_is_differentiable_once():
    function = CompiledFunction(lambda x: x.exp().sum())
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(3 * function(x), x)
        torch.testing.assert_close(gradient, 3 * x.exp().detach(), rtol=1e-14, atol=0)
    with torch.no_grad():
        assert not function(x).requires_grad
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_a_hook_changes_the_kernel_that_runs():
    def hook(kernel, samples, stage, i):
        kernel.trajectory_length = 0.25

    kernel = functools.partial(HMC, step_size=0.05, adapt_step_size=False, num_steps=1)
    chain = fitted_chain(kernel, 3, hook_fn=hook)
    assert chain.kernel.kernel.trajectory_length == 0.25
