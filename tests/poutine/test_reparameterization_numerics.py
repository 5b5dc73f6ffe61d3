"""Local reparameterisation and flipout in low precision and at zero rows."""

import functools
import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.events import Events
from tests.oracles.layers import case_of
from tests.oracles.nets import bnn_of, draws
from tyxe.poutine import flipout, local_reparameterization, local_reparameterization_moments
from tyxe.poutine.flipout import _random_signs


def of_scale(net, scale):
    bnn = bnn_of(net).float()
    with torch.no_grad():
        for parameter in bnn.net_guide.unconstrained_scales.parameters():
            parameter.fill_(math.log(scale))
    return bnn


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
    for leaf in (x, *bnn.net_guide.parameters()):
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-25])
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_autocast_stays_finite_and_close(handler, scale):
    # 1e-25 squared underflows in bfloat16 and in float32: the mean has to survive it.
    net = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(20, 3))
    bnn, x = of_scale(net, scale), torch.randn(8, 2, 5)
    with handler(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = bnn.guided_forward(x)
    assert output.dtype == torch.bfloat16
    output.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in bnn.net_guide.parameters())
    if scale < 1:
        expected = bnn.predict(x, num_predictions=0, aggregate=False)[0]
        # bfloat16 keeps 8 bits; a sum of 20 terms of size one after another rounding.
        bound = 2**-7 * expected.abs().max() + 100 * scale
        assert (output.float() - expected).abs().max() < bound


def test_the_variance_is_formed_in_single_precision_under_autocast():
    # 1e-4 squared is 1e-8: far below what half precision can hold.
    bnn, x = of_scale(nn.Linear(50, 1, bias=False), 1e-4), torch.randn(3, 50)
    with Events() as recorded, local_reparameterization(), torch.autocast("cpu", torch.bfloat16):
        bnn.guided_forward(x)
        ((event, _),) = recorded.events
        mean, variance = local_reparameterization_moments(event, event.weight.moments(), None)
    assert (mean.dtype, variance.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(variance, 1e-8 * x.square().sum(-1, keepdim=True), rtol=1e-5, atol=0)


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
    outputs = draws(bnn, torch.full((8, 4), 5.0).to(dtype), 40, handler())
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
    with pytest.raises(ValueError, match="squares of small scales underflow"):
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
