"""Losses, draws and gradients that are not finite stop a fit, which keeps what it had."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import autoguide
from torch import nn

import tyxe
from tests.oracles.bnns import HIDE_NORMS
from tests.oracles.nets import NetOf
from tests.oracles.rejections import ADAM, X, Y, make


class Explodes(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.value, self.calls = value, 0

    def forward(self, x):
        self.calls += self.training
        output = self.head(self.norm(self.layer(x)))
        return output * self.value if self.training and self.calls > 3 else output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("check", ["step", "epoch"])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_parameters(value, check):
    bnn, reference = (make(Explodes(value), HIDE_NORMS) for _ in range(2))
    reference.load_state_dict(bnn.state_dict())
    optims, seen = [pyro.optim.Adam({"lr": 1e-2}) for _ in range(2)], []
    pyro.set_rng_seed(1)
    expected = reference.fit([(X, Y)], optims[0], 3, beta=0.0)
    pyro.set_rng_seed(1)
    message = {
        "step": r"site 'likelihood.data' is -?(nan|inf)(?s:.)*parameters are those before this",
        "epoch": "in epoch 4 .* before this epoch",
    }
    options = {"beta": 0.0, "nan_check": check, "callback": lambda *at: seen.append(at[-1])}
    with pytest.raises(RuntimeError, match=message[check]) as error:
        bnn.fit([(X, Y)], optims[1], 10, **options)
    if check == "step":
        assert "look for inputs or targets that are not finite" in str(error.value)
    assert seen == expected.loss
    for name, value in reference.state_dict().items():  # BatchNorm's statistics among them
        torch.testing.assert_close(bnn.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert all(module.training for module in bnn.modules())
    states = [next(iter(optim.optim_objs.values())).state_dict() for optim in optims]
    for own, other in zip(*(state["state"].values() for state in states), strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)


def test_a_gradient_that_is_not_finite_is_found_at_the_end_of_the_epoch():
    bnn = make(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    before = {n: p.detach().clone() for n, p in bnn.named_parameters()}
    loc = bnn.net_guide.get_loc("2.bias")
    loc.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(RuntimeError, match="in epoch 1 "):
        bnn.fit([(X, Y)], ADAM, 1, nan_check="epoch")
    for name, parameter in bnn.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def root_of_zero():
    """Return a net whose outputs are finite, and its gradient not."""

    def forward(net, x):
        return net.layer(x) + (net.offset(x) * 0).sqrt()

    return NetOf(forward, layer=nn.Linear(2, 1), offset=nn.Linear(2, 1))


PLACES = {
    "draws": (None, "2.weight", float("nan"), r"non-finite draws of net\.2\.weight"),
    # Behind a tanh: the outputs are finite.
    "KL": (None, "0.bias", 1e25, r"KL is not finite at net\.0\.bias\."),
    "gradient": (root_of_zero, None, 0.0, r"not finite at net_guide\.locs\.offset\.weight"),
}


@pytest.mark.parametrize("what", PLACES)
def test_what_is_not_finite_is_named(what):
    module, site, value, message = PLACES[what]
    bnn = make(module and module())
    with torch.no_grad():
        if site is not None:
            bnn.net_guide.locs[site].fill_(value)
    before = {n: v.clone() for n, v in bnn.named_parameters()}
    with pytest.raises(RuntimeError, match=message):
        bnn.fit([(X, Y)], ADAM, 1)
    for name, parameter in bnn.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0, equal_nan=True)


GUIDES = [
    autoguide.AutoMultivariateNormal,
    partial(autoguide.AutoLowRankMultivariateNormal, rank=1),
    partial(tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, everywhere=True),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("guide", GUIDES, ids=["full", "low rank", "inducing"])
def test_a_covariance_that_breaks_in_a_later_step_stops_the_fit(guide, value):
    """The numbers of its factors are checked in the first step only."""
    bnn = make(guide=guide)

    def spoil(*_) -> None:
        with torch.no_grad():
            list(bnn.net_guide.parameters())[-1].fill_(value)

    with pytest.raises(RuntimeError, match="training stopped"):
        bnn.fit([(X, Y)], ADAM, 2, spoil)


def test_an_error_in_an_epoch_leaves_no_parameter_that_is_not_finite():
    class Refuses(nn.Linear):
        def forward(self, x):
            found = super().forward(x)
            if not bool(found.isfinite().all()):
                raise ArithmeticError("not finite")
            return found

    bnn = make(Refuses(2, 1))
    before = {n: p.detach().clone() for n, p in bnn.named_parameters()}
    loc, calls = bnn.net_guide.get_loc("bias"), []

    def spoil(gradient):
        calls.append(gradient)
        return gradient * (float("nan") if len(calls) > 2 else 1.0)

    loc.register_hook(spoil)
    with pytest.raises(ArithmeticError, match="not finite"):
        bnn.fit([(X[:2], Y[:2])] * 5, ADAM, 1, nan_check="epoch")
    assert len(calls) == 3
    for name, parameter in bnn.named_parameters():
        assert torch.equal(parameter, before[name]), name
