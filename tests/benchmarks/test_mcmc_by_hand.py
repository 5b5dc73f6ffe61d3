"""The potential by hand is that of our model, and leapfrog steps are counted."""

import functools

import pyro
import pytest
import torch
from pyro.infer.mcmc import HMC
from torch import nn

from tests.benchmarks.places import Helper


def test_gradient_on_paper(helper: Helper) -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    problem = helper("_by_hand").TanhRegression(x, x.sin(), noise=0.3, hidden=5)
    z = torch.randn(problem.size, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(problem.potential(z), z)
    torch.testing.assert_close(problem.gradient(z.detach()), expected)


def test_flat_potential_is_the_model_s(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat potential and our model's differ by a constant."""
    by_hand, script = helper("_by_hand"), helper("mcmc")
    monkeypatch.setattr(script, "NOISE", 0.125)  # the same number in all precisions
    x = torch.linspace(-1, 1, 7)[:, None].double()
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    problem = by_hand.TanhRegression(x, x.sin(), script.NOISE, hidden=5)
    bnn = script.make_bnn(HMC, net, len(x))
    differences = []
    for _ in range(3):
        values = {f"net.{name}": torch.randn_like(p) for name, p in net.named_parameters()}
        flat = torch.cat([value.flatten() for value in values.values()])
        trace = pyro.poutine.trace(pyro.poutine.condition(bnn.model, values)).get_trace(x, x.sin())
        differences.append((problem.potential(flat) + trace.log_prob_sum()).item())
    assert differences == pytest.approx([differences[0]] * 3, rel=1e-9)


def test_leapfrog_steps_are_counted(helper: Helper) -> None:
    script = helper("mcmc")
    x = torch.linspace(-1, 1, 10)[:, None]
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    kernel = functools.partial(HMC, **script.FIXED, trajectory_length=4.5e-3)
    bnn = script.make_bnn(kernel, net, len(x))
    assert script.counted(lambda: script.our_chain(bnn, x, x, 5))() == 5 * 4
