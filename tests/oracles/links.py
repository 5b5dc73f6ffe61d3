"""Gaussians over logits, and integrals against them."""

import math

import torch

MEANS = torch.tensor([-4.0, -1.5, 0.0, 0.3, 2.0, 6.0], dtype=torch.float64)
VARIANCES = torch.tensor([0.0, 0.1, 1.0, 4.0, 25.0, 100.0], dtype=torch.float64)


def covariances(*shape: int, rank: int | None = None) -> torch.Tensor:
    size = shape[-1]
    factor = torch.randn(*shape, rank or size + 1, dtype=torch.float64)
    return factor @ factor.mT / size


def expected_sigmoid(mean: torch.Tensor, variance: torch.Tensor, power: float = 1) -> torch.Tensor:
    """`E sigmoid(f)^power` by the trapezoid rule, exponentially accurate for a Gaussian."""
    z = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    values = (mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z).sigmoid() ** power
    return torch.trapezoid(values * density, z)
