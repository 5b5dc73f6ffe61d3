"""Moments of linear maps with random weights, from nothing but the map itself."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.oracles.nets import NetOf


def jacobian_moments(function, x, weight, bias):
    """Mean and variance of `function(x, W, b)`, for independent elements of given moments.

    The output is linear in `(W, b)`, so with the dense Jacobian `J` its mean is `J m` and the
    variance of each element `J^2 v`. `weight` and `bias` are pairs `(mean, variance)`; a bias may
    be None.
    """
    parts = [weight] if bias is None else [weight, bias]
    means = tuple(mean for mean, _ in parts)
    rows = torch.autograd.functional.jacobian(
        lambda *ws: function(x, ws[0], ws[1] if bias is not None else None), means
    )
    shape = function(x, means[0], None).shape
    variance = torch.zeros(shape, dtype=x.dtype)
    mean = torch.zeros(shape, dtype=x.dtype)
    for row, (m, v) in zip(rows, parts, strict=True):
        flat = row.reshape(*shape, -1)
        mean += flat @ m.flatten()
        variance += flat.square() @ v.flatten()
    return mean, variance


def matmul():
    """`x @ w`, with the weight as it stands."""
    return NetOf(lambda net, x: x @ net.weight, weight=nn.Parameter(torch.randn(3, 2)))


def transposed_matmul():
    """`x @ w.T`."""
    return NetOf(lambda net, x: x @ net.weight.T, weight=nn.Parameter(torch.randn(2, 3)))


def halves():
    """One stacked weight, split and used as two maps."""

    def forward(net, x):
        return torch.cat([F.linear(x, half) for half in net.weight.chunk(2)], -1)

    return NetOf(forward, weight=nn.Parameter(torch.randn(4, 3)))


# Each makes a layer, and says the shape of an input.
MAPS = {
    "linear": lambda: (nn.Linear(3, 2), (4, 3)),
    "linear, no bias": lambda: (nn.Linear(3, 2, bias=False), (4, 3)),
    "linear, no batch": lambda: (nn.Linear(3, 2), (3,)),
    "linear, two batch dimensions": lambda: (nn.Linear(3, 2), (4, 5, 3)),
    "linear, three batch dimensions": lambda: (nn.Linear(3, 2), (2, 2, 2, 3)),
    "matmul": lambda: (matmul(), (4, 3)),
    "matmul, transposed": lambda: (transposed_matmul(), (4, 3)),
    "matmul, vector": lambda: (transposed_matmul(), (3,)),
    "split weight": lambda: (halves(), (4, 3)),
    "conv1d": lambda: (nn.Conv1d(2, 3, 3), (2, 2, 6)),
    "conv1d, same": lambda: (nn.Conv1d(2, 3, 3, padding="same", dilation=2), (2, 2, 5)),
    "conv1d, no batch": lambda: (nn.Conv1d(2, 3, 3), (2, 6)),
    "conv1d, circular": lambda: (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), (2, 2, 5)),
    "conv2d": lambda: (nn.Conv2d(2, 3, (3, 2)), (2, 2, 4, 4)),
    "conv2d, stride and padding": lambda: (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 5, 4)),
    "conv2d, dilated": lambda: (nn.Conv2d(2, 2, 2, dilation=2), (2, 2, 4, 4)),
    "conv2d, grouped": lambda: (nn.Conv2d(4, 6, 2, groups=2), (2, 4, 3, 3)),
    "conv2d, depthwise": lambda: (nn.Conv2d(3, 3, 2, groups=3, bias=False), (2, 3, 3, 3)),
    "conv2d, no batch": lambda: (nn.Conv2d(2, 2, 2), (2, 3, 3)),
    "conv3d": lambda: (nn.Conv3d(1, 2, 2, stride=2, padding=1), (2, 1, 3, 3, 2)),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(2, 3, 3, stride=2), (2, 2, 3)),
    "conv_transpose2d": lambda: (
        nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1),
        (2, 2, 2, 2),
    ),
    "conv_transpose2d, grouped": lambda: (
        nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2),
        (2, 4, 2, 2),
    ),
    "conv_transpose3d": lambda: (nn.ConvTranspose3d(1, 2, 2), (1, 1, 2, 2, 2)),
}
