"""Where the benchmarks lie, what imports or runs them, and their nets in the smallest sizes."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
Helper = Callable[[str], ModuleType]
RunScript = Callable[..., None]


def small_net(name: str, helper: Helper) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the MLP or the ResNet of smoke tests in float64, with a batch and its labels."""
    nets = helper("_nets")
    if name == "mlp":
        return nets.mlp(True).double(), *in_double(nets.vectors(6, True))
    return nets.resnet18(True).double(), *in_double(nets.images(4, True))


def in_double(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch with its inputs in float64."""
    return pair[0].double(), pair[1]
