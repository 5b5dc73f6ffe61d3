"""Local reparameterisation and flipout: exact moments, structure, variance."""

import contextlib
import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
from pyro.infer.autoguide import AutoMultivariateNormal

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.events import Events
from tests.oracles.layers import CASES, COUNT, assert_moments, case_of, layer_moments
from tests.oracles.maps import jacobian_moments
from tests.oracles.nets import NetOf, bnn_of, draws, posterior_moments
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.poutine import (
    Draw,
    LinearMap,
    LinearMapMessenger,
    flipout,
    local_reparameterization,
    local_reparameterization_moments,
    report,
)
from tyxe.testing import HANDLERS, check_handler
from tyxe.testing.asserts import assert_within


@pytest.mark.parametrize("factory", HANDLERS.values(), ids=HANDLERS.keys())
def test_contract(factory):
    check_handler(factory)


class OneNoise(LinearMapMessenger):
    """Right distributions of all outputs, of which those of one point share their noise."""

    treatment = "one noise"

    def answer(self, event):
        mean, variance = local_reparameterization_moments(
            event, moments_of(event.weight), moments_of(event.bias)
        )
        return mean + variance.sqrt() * torch.randn(len(mean), 1).to(mean)


def test_the_contract_finds_outputs_that_share_their_noise():
    with pytest.raises(AssertionError, match="covariance of the outputs of a point"):
        check_handler(OneNoise)


def moments_of(part):
    return part.moments() if isinstance(part, Draw) else None if part is None else (part, None)


@pytest.mark.parametrize(("name", "which"), CASES)
def test_moments_are_those_of_the_jacobian(name, which):
    bnn, x = case_of(name, which)
    with Events() as recorded, torch.no_grad(), local_reparameterization():
        bnn.guided_forward(x)
    got = [
        local_reparameterization_moments(event, moments_of(event.weight), moments_of(event.bias))
        for event, _ in recorded.events
    ]
    found = [torch.cat(parts, -1) for parts in zip(*got, strict=True)]
    torch.testing.assert_close(found, [*layer_moments(bnn, x)], rtol=1e-10, atol=1e-10)


# Flipout's signs depend on the kind of map and its dimensions; outputs drawn from moments do not.
OPTIONS = ("same", "circular", "padding", "dilated", "no bias")  # of maps of the same kind
FLIPPED = [
    (name, which)
    for name, which in CASES
    if name in ("linear", "conv2d") or (which == "both" and not name.endswith(OPTIONS))
]
DRAWN = [c for c in FLIPPED if c[0] in ("linear", "conv2d", "linear, no batch", "split weight")]


@pytest.mark.parametrize(
    ("handler", "name", "which"),
    [(flipout, *c) for c in FLIPPED] + [(local_reparameterization, *c) for c in DRAWN],
)
def test_draws_have_the_exact_moments(handler, name, which):
    bnn, x = case_of(name, which)
    assert_moments(draws(bnn, x, COUNT, handler()), *layer_moments(bnn, x))


def test_moments_of_a_map_without_randomness_are_the_map():
    x, weight = torch.ones(1, 2), torch.ones(3, 2)
    event = LinearMap("linear", nn.functional.linear, x, weight, None, 0, 0)
    mean, variance = local_reparameterization_moments(event, (weight, None), None)
    assert torch.equal(mean, torch.full((1, 3), 2.0))
    assert variance is None


# --- structure ----------------------------------------------------------------------------------


def test_local_reparameterization_draws_outputs_independently():
    bnn = bnn_of(nn.Linear(3, 2))
    row = torch.randn(3, dtype=torch.float64)
    mean, variance = layer_moments(bnn, row.expand(1, 3))
    rows = 20000
    (outputs,) = draws(bnn, row.expand(rows, 3), 1, local_reparameterization())
    z = (outputs - mean) / variance.sqrt()
    # Neighbouring rows, and the two outputs of one row: correlations of standard error 1/sqrt(n).
    assert abs((z[1:] * z[:-1]).mean()) < 6 / math.sqrt(2 * rows)
    assert abs((z[:, 0] * z[:, 1]).mean()) < 6 / math.sqrt(rows)
    # Plain draws share the weight: all rows are equal.
    (plain,) = draws(bnn, row.expand(5, 3), 1)
    assert torch.allclose(plain, plain[:1].expand_as(plain), rtol=1e-12)


@pytest.mark.parametrize(
    ("layer", "shape", "where"),
    [
        (lambda: nn.Linear(3, 4, bias=False), (64, 3), (slice(None), 1)),
        (lambda: nn.Conv1d(2, 3, 3, bias=False), (64, 2, 7), (slice(None), 1, 3)),
        (lambda: nn.Conv2d(2, 4, 2, groups=2, bias=False), (64, 2, 3, 3), (slice(None), 0, 1, 1)),
        (lambda: nn.ConvTranspose1d(2, 3, 3, bias=False), (64, 2, 4), (slice(None), 1, 2)),
    ],
    ids=["linear", "conv1d", "grouped", "transposed"],
)
def test_flipout_flips_the_signs_of_one_draw(layer, shape, where):
    # One non-zero input element meets single weights: the deviations of all rows are those
    # weights' own, up to their sign.
    bnn = bnn_of(layer())
    x = torch.zeros(shape, dtype=torch.float64)
    x[where] = 1.0
    mean, variance = layer_moments(bnn, x[:1])
    (outputs,) = draws(bnn, x, 1, flipout())
    deviation = outputs - mean
    size = deviation.abs()
    torch.testing.assert_close(size, size[:1].expand_as(size), rtol=1e-10, atol=1e-12)
    assert bool((size[0][variance[0] > 0] > 0).all())
    signs = deviation.sign().flatten(2) if deviation.dim() > 2 else deviation.sign()[..., None]
    used = (variance[0].flatten(1) if variance.dim() > 2 else variance[0][:, None]) > 0
    for channel in range(signs.shape[1]):
        of_channel = signs[:, channel, used[channel]]
        if of_channel.numel():
            # Up and down over data points: never all 64 equal, by 2^-63.
            assert bool((of_channel[:, 0] > 0).any())
            assert bool((of_channel[:, 0] < 0).any())
            # Constant over positions, relative to the weights' own signs.
            relative = of_channel * of_channel[:1]
            assert torch.equal(relative, relative[:, :1].expand_as(relative))


class AutoLaplace(tyxe.guides.Guide):
    """Laplaces about 1 of one scale."""

    def __init__(self, module):
        super().__init__(module)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def site_distribution(self, site):
        loc = torch.ones(site.shape, dtype=self.scale.dtype)
        return dist.Laplace(loc, self.scale.expand(site.shape)).to_event(len(site.shape))


def test_flipout_keeps_the_law_of_symmetric_posteriors():
    # For one input the deviation is |w| times a sign: exactly Laplace for a Laplace posterior.
    x = torch.ones(1, 1).double()
    bnn = tyxe.VariationalBNN(
        nn.Linear(1, 1, bias=False).double(), NORMAL, HomoskedasticGaussian(5, 1.0), AutoLaplace
    )
    outputs = draws(bnn, x, 600, flipout()).flatten() - 1
    for power, moment in ((1, 0.0), (2, 2.0), (3, 0.0), (4, 24.0)):
        sample = outputs**power
        assert abs(sample.mean() - moment) < 6 * sample.std() / math.sqrt(len(sample))
    with report() as rows, pytest.warns(tyxe.TyxeWarning), local_reparameterization():
        bnn.predict(x)
    assert rows.treatments("weight") == {"drawn"}


# --- weights used twice ---------------------------------------------------------------------------


def tied():
    """Two layers with one weight, side by side."""
    first, second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    second.weight = first.weight
    return NetOf(
        lambda net, x: torch.cat([net.first(x), net.second(x)], -1), first=first, second=second
    )


def twice():
    """One layer called twice."""
    layer = nn.Linear(3, 2, bias=False)
    return NetOf(lambda net, x: torch.cat([net.layer(x), net.layer(x)], -1), layer=layer)


@pytest.mark.parametrize("net", [tied, twice])
def test_each_use_of_a_weight_has_the_right_moments_and_its_own_noise(net):
    bnn, x = bnn_of(net()), torch.randn(2, 3).double()
    (site,) = tyxe.util.pyro_sample_sites(bnn.net)
    weight = posterior_moments(bnn, site)
    mean, variance = jacobian_moments(
        lambda x, w, b: torch.cat([x @ w.T, x @ w.T], -1), x, weight, None
    )
    outputs = draws(bnn, x, COUNT, local_reparameterization())
    assert_moments(outputs, mean, variance)
    z = (outputs - mean) / variance.sqrt()
    assert bool(((z[..., 0] * z[..., 2]).mean(0).abs() < 6 / COUNT**0.5).all())
    # Plain draws are the same weight in both places.
    plain = draws(bnn, x, 3)
    torch.testing.assert_close(plain[..., :2], plain[..., 2:], rtol=0, atol=0)


# --- with guides that they cannot treat ----------------------------------------------------------


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_coupled_guides_are_sampled_plainly_and_said_to_be(handler):
    bnn, x = bnn_of(nn.Linear(2, 1), guide=AutoMultivariateNormal), torch.randn(3, 2).double()

    def predict():
        torch.manual_seed(0)
        return bnn.predict(x, num_predictions=2, aggregate=False)

    with report() as rows, pytest.warns(tyxe.TyxeWarning, match="no effect"), handler():
        handled = predict()
    assert torch.equal(predict(), handled)
    assert {row.treatment for row in rows} == {"drawn"}


def test_the_innermost_handler_answers():
    bnn = bnn_of(nn.Linear(2, 1))
    with report() as rows, local_reparameterization(), flipout():
        bnn.predict(torch.randn(3, 2).double())
    assert rows.treatments("weight") == {"flipped"}


def slope(net, x):
    """The derivatives of a net's outputs in its inputs."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.map(x + 0).sum(), x, create_graph=True)[0]


def by_transform(net, x):
    return torch.func.grad(lambda x: net.map(x + 0).sum())(x)


def in_training(net, x):
    return slope(net, x) if net.training else net.map(x) + 0 * x


def of_map(forward):
    return bnn_of(NetOf(forward, map=nn.Linear(4, 1, bias=False)), dataset_size=15)


@pytest.mark.parametrize("forward", [slope, by_transform])
@pytest.mark.parametrize("handler", [contextlib.nullcontext, flipout, local_reparameterization])
def test_a_net_that_differentiates_is_told_of_and_right_in_others(forward, handler):
    bnn, x = of_map(forward), torch.randn(5, 4).double()
    if handler is local_reparameterization:
        told = pytest.warns(tyxe.TyxeWarning, match="none of a draw of the weights")
        with told, handler():
            bnn.predict(x, num_predictions=2)
        return
    with handler():
        found = bnn.predict(x, num_predictions=200, aggregate=False)
    expected = posterior_moments(bnn, "map.weight")[1].sqrt().expand_as(found[0])
    assert_within(found.std(0), expected, expected / math.sqrt(2 * len(found)), "spread")


def test_derivatives_are_told_of_once_and_those_of_a_fit_are_none():
    x = torch.randn(5, 4).double()
    bnn = bnn_of(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)))
    with local_reparameterization():  # warnings are errors
        bnn.fit([(x, x)], torch.optim.Adam, 1, progress=False)
    bnn = of_map(in_training)
    with local_reparameterization():
        bnn.predict(x, num_predictions=2)
        with pytest.warns(tyxe.TyxeWarning, match="none of a draw") as told:
            bnn.fit(3 * [(x, x)], torch.optim.Adam, 1, progress=False)
    assert len(told) == 1
