"""The layout of sites in one vector: round trips, the order of elements, plain states."""

import pytest
import torch
import torch.nn as nn
from torch import Size

from tyxe.distributions.param_blocks import LinearBlock, ParamBlocks, SiteBlock
from tyxe.files import as_state, of_state

LAYERS = {
    "linear": (nn.Linear(3, 2), 1),
    "convolution": (nn.Conv2d(4, 6, (2, 3)), 1),
    "grouped": (nn.Conv1d(4, 6, 3, groups=2), 2),
    "depthwise": (nn.Conv2d(3, 6, 2, groups=3), 3),
    "transposed": (nn.ConvTranspose2d(4, 6, (2, 3)), 1),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, groups=2), 2),
}


def block_of(name, **missing):
    layer, groups = LAYERS[name]
    names = {"weight": "w", "bias": "b", **missing}
    shape, transposed = layer.weight.shape, "transposed" in name
    return LinearBlock(**names, weight_shape=shape, groups=groups, is_transposed=transposed)


@pytest.mark.parametrize("missing", [{}, {"bias": None}, {"weight": None}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_values_survive_the_vector(name, missing):
    blocks = ParamBlocks((SiteBlock("first", Size([2, 2])), block_of(name, **missing)))
    layer, _ = LAYERS[name]
    shapes = {"w": layer.weight.shape, "b": layer.bias.shape}
    values = {site: torch.randn(shapes.get(site, (2, 2))) for site in blocks.sites}
    vector = blocks.flatten(values)
    assert vector.shape == (blocks.size,) == (sum(v.numel() for v in values.values()),)
    back = blocks.unflatten(vector)
    assert list(back) == list(values)
    assert all(torch.equal(back[site], value) for site, value in values.items())
    # Vectors survive too, many at once.
    vectors = torch.randn(3, blocks.size)
    parts = blocks.unflatten(vectors)
    for i, one in enumerate(vectors):
        assert torch.equal(blocks.flatten({site: value[i] for site, value in parts.items()}), one)


@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_the_matrices_are_outputs(name):
    """The linear map on positions that it sees alone: each group's matrix times its input."""
    (layer, groups), block = LAYERS[name], block_of(name)
    assert (block.outputs, block.name) == (layer.bias.numel() // groups, "w")
    vector = block.to_vector({"w": layer.weight, "b": layer.bias})
    matrices = vector.view(groups, block.outputs, block.columns)
    assert torch.equal(matrices[..., -1].flatten(), layer.bias)
    weight = matrices[..., block.columns_of("w")]
    assert weight.shape[-1] == block.fan_in
    assert matrices[..., block.columns_of("b")].shape[-1] == 1
    kernel = layer.weight.shape[2:]
    if "transposed" in name:
        # One input element spreads the kernel of its channel: all of its group's outputs.
        channels = layer.weight.shape[0]
        x = torch.randn(1, channels, *[1 for _ in kernel])
        found = layer(x)[0] - layer.bias.view(-1, *[1 for _ in kernel])
        split = weight.unflatten(-1, (channels // groups, *kernel))
        by_channel = x.view(groups, 1, -1, *[1 for _ in kernel])
        expected = (split * by_channel).sum(2).flatten(0, 1)
    else:
        x = torch.randn(1, layer.weight.shape[1] * groups, *kernel)
        found = layer(x).flatten() - layer.bias
        expected = torch.einsum("gof,gf->go", weight, x.view(groups, -1)).flatten()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["linear", "transposed, grouped"])
def test_numbers_stand_for_constant_sites(name):
    block = block_of(name)
    blocks = ParamBlocks((block, SiteBlock("last", Size([3]))))
    numbers = {"w": torch.tensor(2.0), "b": torch.tensor(3.0), "last": torch.tensor(4.0)}
    back = blocks.unflatten(blocks.flatten(numbers))
    for site, value in back.items():
        assert value.unique().tolist() == [numbers[site].item()]


def test_a_state_is_plain_and_makes_the_layout_again():
    blocks = ParamBlocks((block_of("transposed"), block_of("grouped", weight=None)))
    blocks = ParamBlocks((*blocks.blocks, *ParamBlocks.of_sites({"a": Size([2, 3])}).blocks))
    state = as_state(blocks)
    plain = {type(value) for one in state["blocks"] for value in one.values()}
    assert plain <= {str, int, bool, list, type(None)}
    assert of_state(ParamBlocks, state) == blocks
    assert (len(blocks), blocks.names) == (3, ["w", "b", "a"])
    assert blocks.sizes == [block.size for block in blocks]
