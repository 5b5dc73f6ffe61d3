"""The nets that the benchmarks share, and data of their shapes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet, conv1x1


def dense(*sizes: int, act: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    """Return linear maps from each size to the next, and what bends their outputs between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias), act()]
    return nn.Sequential(*layers[:-1])


def mlp(smoke_test: bool = False, **how: Any) -> nn.Sequential:
    """Return the MLP 784-400-400-10."""
    return dense(*((16, 8, 8, 4) if smoke_test else (784, 400, 400, 10)), **how)


def resnet18(smoke_test: bool = False) -> nn.Module:
    """Return torchvision's ResNet-18 with the stem that small images need, or one block of it."""
    if smoke_test:
        return one_block()
    net = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def one_block(width: int = 4) -> nn.Sequential:
    """Return a stem, a residual block with a strided shortcut, and a linear head."""
    shortcut = nn.Sequential(conv1x1(width, 2 * width, stride=2), nn.BatchNorm2d(2 * width))
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        BasicBlock(width, 2 * width, stride=2, downsample=shortcut),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def images(count: int, smoke_test: bool = False) -> tuple[Tensor, Tensor]:
    """Return random images `(count, 3, 32, 32)` and labels."""
    side = 8 if smoke_test else 32
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def vectors(count: int, smoke_test: bool = False) -> tuple[Tensor, Tensor]:
    """Return random rows `(count, 784)`, in [0, 1] as pixels are, and labels."""
    features, classes = (16, 4) if smoke_test else (784, 10)
    return torch.rand(count, features), torch.randint(classes, (count,))
