"""The nets that the benchmarks share, and data of their shapes."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet


def mlp(smoke_test: bool = False) -> nn.Sequential:
    """Return the MLP 784-400-400-10."""
    sizes = (16, 8, 8, 4) if smoke_test else (784, 400, 400, 10)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet18(smoke_test: bool = False) -> ResNet:
    """Return torchvision's ResNet-18 with the stem that small images need."""
    net = ResNet(BasicBlock, [1, 1, 1, 1] if smoke_test else [2, 2, 2, 2], num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    if smoke_test:
        net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return net


def images(count: int, smoke_test: bool = False) -> tuple[Tensor, Tensor]:
    """Return random images `(count, 3, 32, 32)` and labels."""
    side = 8 if smoke_test else 32
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def vectors(count: int, smoke_test: bool = False) -> tuple[Tensor, Tensor]:
    """Return random rows `(count, 784)`, in [0, 1] as pixels are, and labels."""
    features, classes = (16, 4) if smoke_test else (784, 10)
    return torch.rand(count, features), torch.randint(classes, (count,))
