"""Curvature of products of other kinds, against that of `F.linear`, and patches."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.oracles.curvature import curvature_of, jacobian_of, linearizing
from tests.oracles.nets import NetOf
from tests.oracles.products import PRODUCTS, Weighted
from tyxe.curvature import functional_covariance
from tyxe.curvature.layer_calls import LayerCallRecorder, patches
from tyxe.distributions.param_blocks import LinearBlock, ParamBlocks
from tyxe.files import as_state, of_state
from tyxe.poutine import Draw

# Points come first in the inputs of these.
BATCHED = {
    name: product
    for name, product in PRODUCTS.items()
    if len(product.inputs) > 1 and product.inputs[0] == 4
}


def made(product, function, values=None):
    rows = NetOf(lambda _, x: x.reshape(len(x), -1))  # one for each point
    net = nn.Sequential(Weighted(product, function), nn.Tanh(), rows, nn.LazyLinear(2))
    return linearizing(net, torch.randn(product.inputs).double(), values)


def pair(name):
    """The product as it is written, and the same by layers, with the values in their places."""
    torch.manual_seed(0)
    product = BATCHED[name]
    written = made(product, product.written)
    torch.manual_seed(0)
    return written, made(product, product.linear, written[1])


@pytest.mark.parametrize("name", BATCHED)
def test_the_weight_has_factors_and_the_jacobian_is_that_of_autograd(name):
    (bnn, values, x, linearize), _ = pair(name)
    linear = linearize(x)
    blocks = {site: block for block in linear.blocks for site in block.sites}
    assert isinstance(blocks["net.0.weight"], LinearBlock)
    vector = linear.blocks.flatten(values)
    assert all(torch.equal(v, values[site]) for site, v in linear.blocks.unflatten(vector).items())
    batch = linear.blocks.unflatten(torch.stack([vector, 2 * vector]))
    assert all(torch.equal(v[1], 2 * values[site]) for site, v in batch.items())
    restored = of_state(ParamBlocks, as_state(linear.blocks))
    assert restored == linear.blocks
    full = curvature_of(bnn, linearize, x, "full").operator.to_dense()
    # Of the whole batch: some products have as many weights as it has points.
    found = jacobian_of(bnn.net, x, [name.removeprefix("net.") for name in values]).flatten(0, 1)
    parts = found.split([value.numel() for value in values.values()], 1)
    named = zip(values.items(), parts, strict=True)
    by_site = {name: part.reshape(-1, *value.shape) for (name, value), part in named}
    order = linear.blocks.flatten
    rows = torch.stack([order({n: v[i] for n, v in by_site.items()}) for i in range(len(found))])
    torch.testing.assert_close(full, rows.T @ rows / 0.25, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", BATCHED)
def test_kronecker_factors_and_covariances_are_those_of_the_linear_map(name):
    """A diagonal of one product, and a product with a vector, in the sites' own coordinates."""
    found, covariances = [], []
    for bnn, values, x, linearize in pair(name):
        linear = linearize(x)
        blocks, operator = linear.blocks, curvature_of(bnn, linearize, x, "kron").operator
        covariances.append(functional_covariance(linear, operator.add_diagonal(0.7)))
        torch.manual_seed(1)
        vector = blocks.flatten({site: torch.randn_like(value) for site, value in values.items()})
        found.append(
            (blocks.unflatten(operator.diagonal()), blocks.unflatten(operator.to_dense() @ vector))
        )
    torch.testing.assert_close(*covariances, rtol=1e-9, atol=1e-10)
    for written, linear in zip(*found, strict=True):
        for site, value in linear.items():
            torch.testing.assert_close(written[site], value, rtol=1e-9, atol=1e-10)


def record(function, x, weight, *args, **kwargs):
    with LayerCallRecorder() as recorder:
        function(x, Draw("w", None, weight), None, *args, **kwargs)
    (call,) = recorder.calls
    return call


CONVOLUTIONS = {
    "positional": (F.conv2d, (3, 4, 6, 7), (5, 4, 2, 3), ((2, 1), (0, 1), (1, 2)), {}),
    "torch's own": (torch.conv2d, (3, 4, 6, 7), (5, 4, 2, 3), (2, 1, 2), {}),
    "by name": (F.conv2d, (3, 4, 6, 7), (6, 2, 2, 3), (), {"groups": 2, "padding": 1}),
    "same, even kernel": (F.conv2d, (3, 4, 6, 7), (5, 4, 2, 4), (), {"padding": "same"}),
    "same, dilated": (F.conv1d, (3, 4, 9), (5, 4, 4), (1, "same", 3), {}),
    "valid": (F.conv1d, (3, 4, 9), (5, 4, 3), (2, "valid"), {}),
    "one dimension": (F.conv1d, (3, 4, 9), (4, 1, 3), (2, 1, 2, 4), {}),
    "three dimensions": (F.conv3d, (2, 2, 4, 5, 6), (3, 2, 2, 1, 3), (2, 1, 1), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "expanded"])
def test_patches_are_what_the_kernel_covers(name, layout):
    """The convolution itself, by patches times the weight's matrices."""
    torch.manual_seed(0)
    function, shape, weight_shape, args, kwargs = CONVOLUTIONS[name]
    x = torch.randn(shape).double()
    if layout == "channels last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "expanded":
        x = x[:1].expand(shape)
    weight = torch.randn(weight_shape).double()
    call = record(function, x, weight, *args, **kwargs)
    found = patches(call, len(x))
    matrices = weight.reshape(call.groups, -1, weight[0].numel())
    outputs = torch.einsum("nrgi,goi->ngor", found, matrices).flatten(1, 2)
    expected = function(x, weight, None, *args, **kwargs)
    torch.testing.assert_close(outputs, expected.flatten(2), rtol=1e-12, atol=1e-12)
    with_one = patches(call, len(x), with_one=True)
    assert torch.equal(with_one[..., :-1], found)
    assert bool((with_one[..., -1] == 1).all())


def test_patches_of_an_input_with_one_more_batch_dimension_become_positions():
    x = torch.randn(2, 3, 4, 5, 5).double()
    call = record(F.conv2d, x.flatten(0, 1), torch.randn(2, 4, 3, 3).double())
    apart, together = patches(call, 6), patches(call, 2)
    assert torch.equal(together, apart.reshape(2, 3 * 9, 1, 36))
