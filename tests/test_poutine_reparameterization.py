"""Local reparameterisation and flipout: exact moments, structure, variance, numerics."""

import contextlib
import functools
import math

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn as nn
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.poutine.messenger import Messenger
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.maps import MAPS, jacobian_moments
from tests.oracles.nets import bnn_of, draws, posterior_moments
from tyxe.poutine import (
    Draw,
    LinearMap,
    flipout,
    local_reparameterization,
    local_reparameterization_moments,
    report,
)
from tyxe.poutine.reparameterization import _random_signs
from tyxe.testing import HANDLERS, check_handler
from tyxe.testing.asserts import assert_within

COUNT = 600
WHICH = {
    "both": {},
    "weight": {"hide_parameters": ["bias"]},
    "bias": {"hide_parameters": ["weight"]},
}


class Events(Messenger):
    """Keep every linear map with its output."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _pyro_post_linear_map(self, msg):
        self.events.append((msg["args"][0], msg["value"]))


@pytest.mark.parametrize("factory", HANDLERS.values(), ids=HANDLERS.keys())
def test_contract(factory):
    check_handler(factory)


# --- moments ------------------------------------------------------------------------------------


BIASED = [name for name, make in MAPS.items() if getattr(make().layer, "bias", None) is not None]
CASES = [(name, "both") for name in MAPS]
CASES += [(name, which) for name in BIASED for which in ("weight", "bias")]


def case_of(name, which):
    case = MAPS[name]()
    bnn = bnn_of(case.layer, **WHICH[which])
    return bnn, torch.randn(case.shape, dtype=torch.float64)


def layer_moments(bnn, x):
    """Moments of the layer's output by the Jacobian of its own forward."""

    def function(x, weight, bias):
        values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        if bias is None and getattr(bnn.net, "bias", None) is not None:
            values["bias"] = torch.zeros_like(bnn.net.bias)
        return torch.func.functional_call(bnn.net, values, x)

    weight, bias = posterior_moments(bnn, "weight"), posterior_moments(bnn, "bias")
    return jacobian_moments(function, x, weight, bias)


@pytest.mark.parametrize(("name", "which"), CASES)
def test_moments_are_those_of_the_jacobian(name, which):
    bnn, x = case_of(name, which)
    with Events() as recorded, torch.no_grad(), local_reparameterization():
        bnn.guided_forward(x)
    got = []
    for event, _ in recorded.events:
        parts = [
            part.moments() if isinstance(part, Draw) else None if part is None else (part, None)
            for part in (event.weight, event.bias)
        ]
        got.append(local_reparameterization_moments(event, *parts))
    mean, variance = (torch.cat([m[i] for m in got], -1) for i in range(2))
    expected_mean, expected_variance = layer_moments(bnn, x)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(variance, expected_variance, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize(
    ("name", "which"), [c for c in CASES if c[1] == "both" or c[0] in ("linear", "conv2d")]
)
def test_draws_have_the_exact_moments(name, which, handler):
    bnn, x = case_of(name, which)
    mean, variance = layer_moments(bnn, x)
    outputs = draws(bnn, x, COUNT, handler())
    assert_within(outputs.mean(0), mean, (variance / COUNT).sqrt(), "mean")
    squares = (outputs - mean).square()
    error = squares.std(0) / math.sqrt(COUNT)
    assert_within(squares.mean(0), variance, error, "variance")


def test_moments_of_a_map_without_randomness_are_the_map():
    event = LinearMap(
        "linear", torch.nn.functional.linear, torch.ones(1, 2), torch.ones(3, 2), None, 0, 0
    )
    mean, variance = local_reparameterization_moments(event, (torch.ones(3, 2), None), None)
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


def test_flipout_given_the_draw_keeps_mean_and_variance_over_signs():
    bnn = bnn_of(nn.Linear(3, 2))
    row = torch.randn(3, dtype=torch.float64)
    rows = 20000
    centre = layer_moments(bnn, row.expand(1, 3))[0]
    eye = torch.cat([torch.eye(3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)])
    x = torch.cat([eye, row.expand(rows, 3)])
    (outputs,) = draws(bnn, x, 1, flipout())
    offsets = layer_moments(bnn, eye)[0]
    # Row i of the identity shows weight column i and the bias, with independent signs.
    mixed = (outputs[:3] - offsets[:3]).abs()
    bias = (outputs[3] - offsets[3]).abs()
    errors = outputs[4:] - centre
    assert_within(errors.mean(0), torch.zeros(2).double(), errors.std(0) / rows**0.5, "mean")
    squares = errors.square()
    # |w + b| or |w - b| was seen; either way |w| is one of two numbers for each input.
    candidates = torch.stack([(mixed - bias).abs(), mixed + bias])
    totals = torch.stack(
        [
            sum(row[i] ** 2 * candidates[(pick >> i) & 1, i] ** 2 for i in range(3)) + bias**2
            for pick in range(8)
        ]
    )
    distance = (totals - squares.mean(0)).abs().min(0).values
    assert bool((distance < 6 * squares.std(0) / rows**0.5).all())


def test_flipout_keeps_the_law_of_symmetric_posteriors():
    # For one input the deviation is |w| times a sign: exactly Laplace for a Laplace posterior.
    class AutoLaplace(tyxe.guides.Guide):
        def __init__(self, module):
            super().__init__(module)
            self.scale = nn.Parameter(torch.ones(()))

        def site_distribution(self, site):
            loc = torch.ones(site.shape, dtype=self.scale.dtype)
            return dist.Laplace(loc, self.scale.expand(site.shape)).to_event(len(site.shape))

    bnn = tyxe.VariationalBNN(
        nn.Linear(1, 1, bias=False),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        tyxe.likelihoods.HomoskedasticGaussian(5, scale=1.0),
        AutoLaplace,
    )
    outputs = draws(bnn, torch.ones(1, 1), 1500, flipout()).flatten() - 1
    for power, moment in ((1, 0.0), (2, 2.0), (3, 0.0), (4, 24.0)):
        sample = outputs**power
        assert abs(sample.mean() - moment) < 6 * sample.std() / math.sqrt(len(sample))
    with report() as rows, pytest.warns(tyxe.TyxeWarning), local_reparameterization():
        bnn.predict(torch.ones(1, 1))
    assert rows.treatments("weight") == {"drawn"}


def test_the_weight_is_not_drawn():
    bnn = bnn_of(nn.Linear(3, 2))
    with Events() as recorded, local_reparameterization():
        bnn.guided_forward(torch.randn(4, 3, dtype=torch.float64))
    ((event, _),) = recorded.events
    assert not event.weight.was_drawn
    assert not event.bias.was_drawn


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_gradients_vary_less_than_plain_ones(handler):
    bnn = bnn_of(nn.Linear(5, 1))
    x, y = torch.randn(64, 5).double(), torch.randn(64, 1).double()
    parameters = list(bnn.net_guide.parameters())

    def gradient_variance(active):
        gradients = []
        for _ in range(300):
            with active():
                output = bnn.guided_forward(x)
            loss = (output - y).square().mean()
            grads = torch.autograd.grad(loss, parameters)
            gradients.append(torch.cat([g.flatten() for g in grads]))
        return torch.stack(gradients).var(0)

    handled, plain = gradient_variance(handler), gradient_variance(contextlib.nullcontext)
    # A ratio of variances of 300 draws each has a standard error of some 12 %. Flipout helps the
    # means most: squares of its one draw remain in the gradients of scales.
    count = sum(p.numel() for p in bnn.net_guide.locs.parameters())
    assert bool((handled[:count] < 0.5 * plain[:count]).all())
    assert handled.sum() < 0.5 * plain.sum()


# --- weights used twice ---------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers with one weight, side by side."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x)], -1)


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return torch.cat([self.layer(x), self.layer(x)], -1)


@pytest.mark.parametrize("net", [Tied, Twice])
def test_each_use_of_a_weight_has_the_right_moments_and_its_own_noise(net):
    bnn = bnn_of(net())
    (site,) = tyxe.util.pyro_sample_sites(bnn.net)
    x = torch.randn(2, 3).double()
    weight = posterior_moments(bnn, site)
    mean, variance = jacobian_moments(
        lambda x, w, b: torch.cat([x @ w.T, x @ w.T], -1), x, weight, None
    )
    outputs = draws(bnn, x, COUNT, local_reparameterization())
    assert_within(outputs.mean(0), mean, (variance / COUNT).sqrt(), "mean")
    squares = (outputs - mean).square()
    assert_within(squares.mean(0), variance, squares.std(0) / COUNT**0.5, "variance")
    z = (outputs - mean) / variance.sqrt()
    products = (z[..., 0] * z[..., 2]).mean(0)
    assert bool((products.abs() < 6 / COUNT**0.5).all())
    # Plain draws are the same weight in both places.
    plain = draws(bnn, x, 3)
    torch.testing.assert_close(plain[..., :2], plain[..., 2:], rtol=0, atol=0)


# --- numerics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_all_zero_rows_have_finite_gradients(handler):
    bnn = bnn_of(nn.Linear(3, 2, bias=False))
    x = torch.randn(4, 3).double()
    x[1] = 0.0
    x.requires_grad_()
    with handler():
        output = bnn.guided_forward(x)
    # The floor of the variance shows up as noise far below anything that matters.
    assert output[1].detach().abs().max() < 1e-100
    output.sum().backward()
    assert bool(x.grad.isfinite().all())
    for parameter in bnn.net_guide.parameters():
        assert bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-25])
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_autocast_stays_finite_and_close(handler, scale):
    # 1e-25 squared underflows in bfloat16 and in float32: the mean has to survive it.
    net = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(20, 3))
    bnn = bnn_of(net).float()
    with torch.no_grad():
        for parameter in bnn.net_guide.unconstrained_scales.parameters():
            parameter.fill_(math.log(scale))
    x = torch.randn(8, 2, 5)
    with handler(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = bnn.guided_forward(x)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    for parameter in bnn.net_guide.parameters():
        assert bool(parameter.grad.isfinite().all())
    if scale < 1:
        expected = bnn.predict(x, num_predictions=0, aggregate=False)[0]
        # bfloat16 keeps 8 bits; a sum of 20 terms of size one after another rounding.
        bound = 2**-7 * expected.abs().max() + 100 * scale
        assert (output.float() - expected).abs().max() < bound


def test_the_variance_is_formed_in_single_precision_under_autocast():
    # 1e-4 squared is 1e-8: far below what half precision can hold.
    layer = nn.Linear(50, 1, bias=False)
    event_types = []
    bnn = bnn_of(layer).float()
    with torch.no_grad():
        for parameter in bnn.net_guide.unconstrained_scales.parameters():
            parameter.fill_(math.log(1e-4))
    x = torch.randn(3, 50)
    with Events() as recorded, local_reparameterization(), torch.autocast("cpu", torch.bfloat16):
        bnn.guided_forward(x)
        ((event, _),) = recorded.events
        mean, variance = local_reparameterization_moments(event, event.weight.moments(), None)
        event_types += [mean.dtype, variance.dtype]
    assert event_types == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(variance, 1e-8 * x.square().sum(-1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_low_precision_nets_run(handler):
    bnn = bnn_of(nn.Linear(3, 2)).bfloat16()
    with handler():
        outputs = bnn.predict(torch.randn(4, 3).bfloat16(), num_predictions=2, aggregate=False)
    assert outputs.dtype == torch.bfloat16
    assert bool(outputs.isfinite().all())


# --- checkpointing --------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block in a checkpoint, with linear maps and weights that only plain draws can serve."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.middle = nn.Linear(3, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 1)
        self.use_reentrant = use_reentrant

    def block(self, x):
        return self.middle(self.norm(torch.tanh(self.middle(x))))

    def forward(self, x):
        x = self.first(x)
        if self.use_reentrant is None:
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


def checkpointed_gradient(use_reentrant, handler, **options):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    bnn = bnn_of(Checkpointed(use_reentrant), dataset_size=8)
    torch.manual_seed(1)
    with handler():
        bnn.fit([(x, y)], torch.optim.SGD(bnn.parameters(), lr=0.0), 1, **options)
    return torch.cat([p.grad.flatten() for p in bnn.parameters() if p.grad is not None])


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("closed_form_kl", [True, False])
@pytest.mark.parametrize("handler", [contextlib.nullcontext, local_reparameterization, flipout])
def test_checkpointing_gives_the_same_gradient(handler, closed_form_kl):
    expected = checkpointed_gradient(None, handler, closed_form_kl=closed_form_kl)
    actual = checkpointed_gradient(False, handler, closed_form_kl=closed_form_kl)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
# Said of the check of the first batch, which runs without gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("handler", [contextlib.nullcontext, local_reparameterization, flipout])
def test_reentrant_checkpointing_is_right_or_refused(handler):
    # A reentrant checkpoint runs a backward pass of its own. Weights that are no leaves then are
    # gone through twice, which PyTorch refuses: better than a gradient that misses a part.
    expected = checkpointed_gradient(None, handler)
    try:
        actual = checkpointed_gradient(True, handler)
    except RuntimeError as error:
        assert "backward through the graph a second time" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- with guides that they cannot treat ----------------------------------------------------------


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_coupled_guides_are_sampled_plainly_and_said_to_be(handler):
    bnn = bnn_of(nn.Linear(2, 1), guide=AutoMultivariateNormal)
    x = torch.randn(3, 2).double()
    torch.manual_seed(0)
    plain = bnn.predict(x, num_predictions=2, aggregate=False)
    torch.manual_seed(0)
    with report() as rows, pytest.warns(tyxe.TyxeWarning, match="no effect"), handler():
        handled = bnn.predict(x, num_predictions=2, aggregate=False)
    assert torch.equal(plain, handled)
    assert {row.treatment for row in rows} == {"drawn"}


def test_the_innermost_handler_answers():
    bnn = bnn_of(nn.Linear(2, 1))
    with report() as rows, local_reparameterization(), flipout():
        bnn.predict(torch.randn(3, 2).double())
    assert rows.treatments("weight") == {"flipped"}


def test_the_elbo_of_a_linear_model_has_the_same_mean_under_handlers():
    torch.manual_seed(0)
    bnn = bnn_of(nn.Linear(2, 1), dataset_size=6)
    x, y = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    mean, variance = layer_moments(bnn, x)
    noise = -0.5 * math.log(2 * math.pi) - 0.5 * ((y - mean).square() + variance)
    for handler in (contextlib.nullcontext, local_reparameterization, flipout):
        terms = []
        for _ in range(300):
            with torch.no_grad(), handler():
                terms.append(tyxe.bnn.elbo.elbo_terms(bnn.model, bnn.guide, x, y).data)
        values = torch.stack(terms)
        assert abs(values.mean() - noise.sum()) < 6 * values.std() / math.sqrt(len(values))


def test_a_trace_of_the_guide_outside_the_handler_is_untouched():
    bnn = bnn_of(nn.Linear(2, 1))
    trace = poutine.trace(bnn.guide).get_trace()
    assert not isinstance(trace.nodes["net.weight"]["value"], Draw)


def test_hidden_parameters_stay_parameters():
    bnn = bnn_of(nn.Linear(2, 1), hide_parameters=["bias"])
    with Events() as recorded, local_reparameterization():
        bnn.guided_forward(torch.randn(3, 2).double())
    ((event, _),) = recorded.events
    assert isinstance(event.bias, nn.Parameter)


# --- half precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("hide", [[], ["bias"]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_a_variance_too_small_for_half_precision_is_sampled(handler, dtype, hide):
    # The square of 1e-4 is zero in float16.
    guide = functools.partial(
        tyxe.guides.AutoNormal, init_loc_fn=tyxe.guides.init_to_zero, init_scale=1e-4
    )
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_parameters=hide)
    net = nn.Linear(4, 50)
    nn.init.zeros_(net.bias)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=1.0)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide).to(dtype)
    assert bnn.net_guide.get_scale("weight").dtype == dtype
    with handler(), torch.no_grad():
        outputs = torch.cat(
            [bnn.guided_forward(torch.full((8, 4), 5.0).to(dtype)) for _ in range(40)]
        )
    assert outputs.dtype == dtype
    # Four inputs of 5 make ten times 1e-4; some 2,000 independent numbers at least.
    assert outputs.float().std() == pytest.approx(1e-3, rel=0.2)
    assert bool(outputs.isfinite().all())


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_variances_in_bfloat16_are_off_by_their_rounding(name):
    bnn, x = case_of(name, "both")
    moments = []
    for dtype in (None, torch.bfloat16):
        with Events() as recorded, torch.no_grad(), local_reparameterization(dtype):
            bnn.guided_forward(x)
        ((event, _),) = recorded.events
        weight, bias = event.weight.moments(), event.bias.moments()
        moments.append(local_reparameterization_moments(event, weight, bias, dtype))
    (mean, variance), (mean_16, variance_16) = moments
    assert torch.equal(mean, mean_16)
    assert variance_16.dtype == variance.dtype
    # Two factors and the sum, each rounded to eight bits; sums of positive numbers add no more.
    bound = (1 + 2**-8) ** 3 - 1
    assert 0 < float((variance_16 / variance - 1).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_a_variance_type_without_range_is_refused(dtype):
    with pytest.raises(ValueError, match=r"expected torch.bfloat16 or a wider"):
        local_reparameterization(variance_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (64, 500)])
def test_signs_are_fair_and_independent(shape, dtype):
    signs = _random_signs(list(shape), dtype, torch.device("cpu"))
    assert signs.shape == shape
    assert signs.dtype == dtype
    assert bool((signs.abs() == 1).all())
    flat = signs.double().flatten()
    for lag in (0, 1, 7, 8, 63, 64):
        if lag < flat.numel():
            products = flat if lag == 0 else flat[:-lag] * flat[lag:]
            assert abs(products.mean()) <= 5 / math.sqrt(products.numel())
