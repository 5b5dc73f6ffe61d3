"""Densities with exact draws and probabilities, for samplers: potentials of `(chains, d)`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.stats import chi2
from torch import Tensor

from tyxe.samplers import batched
from tyxe.samplers.potential import Potential


class Density(NamedTuple):
    """A density: its potential, exact draws `(count, d)`, and a map of draws to uniform numbers."""

    potential: Potential
    draw: Callable[[int], Tensor]
    uniform: Callable[[Tensor], Tensor]


def normal_cdf(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def scaled_gaussian(scales: Tensor) -> Potential:
    """Return the potential of independent Normals."""

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        gradient = position / scales.square()
        return 0.5 * (position * gradient).sum(-1), gradient

    return potential


def correlated_gaussian() -> Density:
    """Return a Normal of two dimensions with correlation 0.9 and unlike scales."""
    covariance = torch.tensor([[1.0, 1.8], [1.8, 4.0]], dtype=torch.double)
    precision, root = covariance.inverse(), torch.linalg.cholesky(covariance)

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        gradient = position @ precision
        return 0.5 * (position * gradient).sum(-1), gradient

    def uniform(draws: Tensor) -> Tensor:
        return normal_cdf(torch.linalg.solve_triangular(root, draws.T, upper=False).T)

    return Density(potential, lambda n: torch.randn(n, 2, dtype=torch.double) @ root.T, uniform)


def funnel() -> Density:
    """Return Neal's funnel of three dimensions: `v ~ N(0, 1.5^2)`, and two `x ~ N(0, exp(v))`."""

    def energy(w: Tensor) -> Tensor:
        v, x = w[0], w[1:]
        return 0.5 * (v / 1.5) ** 2 + 0.5 * x.square().sum() * torch.exp(-v) + v

    def draw(count: int) -> Tensor:
        z = torch.randn(count, 3, dtype=torch.double)
        v = 1.5 * z[:, :1]
        return torch.cat([v, z[:, 1:] * (0.5 * v).exp()], -1)

    def uniform(draws: Tensor) -> Tensor:
        v = draws[:, :1]
        return normal_cdf(torch.cat([v / 1.5, draws[:, 1:] * (-0.5 * v).exp()], -1))

    return Density(batched(energy, torch.zeros(1, 3, dtype=torch.double)), draw, uniform)


def mixture() -> Density:
    """Return .3 N((-1.5, 0), .5^2) + .7 N((1.5, 0), 1) in two dimensions."""
    weights = torch.tensor([0.3, 0.7], dtype=torch.double)
    means = torch.tensor([[-1.5, 0.0], [1.5, 0.0]], dtype=torch.double)
    scales = torch.tensor([0.5, 1.0], dtype=torch.double)

    def logs(w: Tensor) -> Tensor:
        exponent = -0.5 * (w[..., None, :] - means).square().sum(-1) / scales.square()
        return weights.log() - 2 * scales.log() + exponent

    def draw(count: int) -> Tensor:
        which = torch.multinomial(weights, count, replacement=True)
        noise = torch.randn(count, 2, dtype=torch.double)
        return means[which] + scales[which, None] * noise

    def uniform(draws: Tensor) -> Tensor:
        # Rosenblatt: the first coordinate by its marginal, the second by its conditional.
        x, y = draws[:, :1], draws[:, 1:]
        first = (weights * normal_cdf((x - means[:, 0]) / scales)).sum(-1)
        part = weights / scales * torch.exp(-0.5 * ((x - means[:, 0]) / scales).square())
        second = (part * normal_cdf(y / scales)).sum(-1) / part.sum(-1)
        return torch.stack([first, second], -1)

    one = batched(lambda w: -logs(w).logsumexp(-1), torch.zeros(1, 2, dtype=torch.double))
    return Density(one, draw, uniform)


def cells_p_value(uniform: Tensor, cells: int = 5) -> float:
    """Return the p-value of Pearson's chi-square test of uniform numbers on a grid of cells."""
    count, d = uniform.shape
    places = (uniform * cells).long().clamp(max=cells - 1)
    number = (places * cells ** torch.arange(d)).sum(-1)
    found = torch.bincount(number, minlength=cells**d).double()
    expected = count / cells**d
    statistic = ((found - expected) ** 2 / expected).sum()
    return float(chi2.sf(float(statistic), cells**d - 1))
