"""Patches of convolutions are what the kernel covers."""

import pytest
import torch
import torch.nn.functional as F

from tyxe.curvature.layer_calls import LayerCallRecorder, patches
from tyxe.poutine import Draw


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
