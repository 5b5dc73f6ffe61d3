"""The contract of handlers that change how linear maps are sampled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn

from tyxe.bnn import VariationalBNN
from tyxe.errors import TyxeWarning
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.poutine import flipout, local_reparameterization, report
from tyxe.priors import IIDPrior
from tyxe.testing.asserts import assert_close, assert_within

NUM_DRAWS = 800

HANDLERS: dict[str, Callable[[], Any]] = {
    "local_reparameterization": local_reparameterization,
    "flipout": flipout,
}


class _Interrupted(Exception):
    """Raised inside a handler on purpose."""


def check_handler(factory: Callable[[], Any]) -> None:
    """Assert that a handler changes how outputs are drawn, and keeps their first two moments.

    Outputs at different points, or positions of a feature map, may be drawn jointly in another way.

    Args:
        factory: makes the handler.

    Example:
        >>> check_handler(local_reparameterization)
    """
    bnn, inputs = _example()
    _check_stack(factory, bnn, inputs)
    _check_decorator(factory, bnn, inputs)
    _check_moments(factory, bnn, inputs)
    # One map, of which no further map hides how its outputs vary together.
    _check_moments(factory, _mean_field(nn.Linear(2, 3).double()), inputs)
    _check_gradients(factory, bnn, inputs)
    _check_report(factory, bnn, inputs)
    _check_without_sites(factory, inputs)


def _example() -> tuple[VariationalBNN, Tensor]:
    """Return a net and inputs; each output has the same distribution under every handler."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return _mean_field(net), torch.randn(4, 2, dtype=torch.float64, device="cpu")


def _mean_field(net: nn.Module) -> VariationalBNN:
    prior, likelihood = IIDPrior(dist.Normal(0.0, 1.0)), HomoskedasticGaussian(4, scale=1.0)
    bnn = VariationalBNN(net, prior, likelihood, AutoNormal)
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(torch.randn_like(parameter))
    return bnn


def _outputs(bnn: VariationalBNN, inputs: Tensor, count: int = 1) -> Tensor:
    return bnn.predict(inputs, num_predictions=count, aggregate=False)


def _check_stack(factory: Callable[[], Any], bnn: VariationalBNN, inputs: Tensor) -> None:
    with factory():
        assert am_i_wrapped(), "the handler is not on Pyro's stack while it is active"
        _outputs(bnn, inputs)
    assert not am_i_wrapped(), "the handler stays on Pyro's stack"
    with contextlib.suppress(_Interrupted), factory():
        _outputs(bnn, inputs)
        raise _Interrupted
    assert not am_i_wrapped(), "the handler stays on Pyro's stack after an exception"


def _check_decorator(factory: Callable[[], Any], bnn: VariationalBNN, inputs: Tensor) -> None:
    torch.manual_seed(0)
    decorated = factory()(lambda: _outputs(bnn, inputs))()
    torch.manual_seed(0)
    with factory():
        managed = _outputs(bnn, inputs)
    assert_close(decorated, managed, "the handler as a decorator and as a context manager")
    assert not am_i_wrapped(), "the decorator stays on Pyro's stack"


def _check_moments(factory: Callable[[], Any], bnn: VariationalBNN, inputs: Tensor) -> None:
    plain = _outputs(bnn, inputs, NUM_DRAWS)
    with factory():
        handled = _outputs(bnn, inputs, NUM_DRAWS)
    spreads = [draws - plain.mean(0) for draws in (handled, plain)]
    both = {
        "mean": [handled, plain],
        "covariance": [spread.unsqueeze(-1) * spread.unsqueeze(-2) for spread in spreads],
    }
    for what, (a, b) in both.items():
        error = ((a.var(0) + b.var(0)) / NUM_DRAWS).sqrt()
        assert_within(
            a.mean(0), b.mean(0), error, f"{what} of the outputs of a point, handled and plain"
        )


def _check_gradients(factory: Callable[[], Any], bnn: VariationalBNN, inputs: Tensor) -> None:
    with factory():
        outputs = bnn.guided_forward(inputs)
    assert outputs.requires_grad, "outputs have no gradient"
    gradients = torch.autograd.grad(outputs.sum(), [p for p in bnn.parameters() if p.requires_grad])
    assert all(bool(g.isfinite().all()) for g in gradients), "a gradient is not finite"
    assert any(bool((g != 0).any()) for g in gradients), "all gradients are 0"
    with factory(), torch.no_grad():
        outputs = bnn.guided_forward(inputs)
    assert not outputs.requires_grad, "outputs have a gradient under no_grad"
    assert outputs.shape == (4, 2), f"outputs have shape {outputs.shape}"


def _check_report(factory: Callable[[], Any], bnn: VariationalBNN, inputs: Tensor) -> None:
    with report() as rows, factory():
        _outputs(bnn, inputs)
    listed = {row.site for row in rows}
    expected = set(bnn.guide())
    assert listed == expected, f"report lists {sorted(listed)}, expected {sorted(expected)}"
    for site in expected:
        assert rows.treatments(site) != {"drawn"}, f"{site} was sampled plainly"


def _check_without_sites(factory: Callable[[], Any], inputs: Tensor) -> None:
    net = nn.Linear(2, 2).double()
    prior = IIDPrior(dist.Normal(0.0, 1.0), hide_all=True)
    bnn = VariationalBNN(net, prior, HomoskedasticGaussian(4, scale=1.0))
    with warnings.catch_warnings():
        # A handler may warn that it had no effect.
        warnings.simplefilter("ignore", TyxeWarning)
        with factory():
            outputs = _outputs(bnn, inputs)[0]
    assert_close(outputs, net(inputs).detach(), "outputs of a net without sites")
