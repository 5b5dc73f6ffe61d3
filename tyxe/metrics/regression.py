"""Scores of Gaussian predictions."""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import average, check_regression, check_scale


def rmse(mean: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Root of the mean squared error, in the targets' units.

    `sqrt(mean (y - mu)^2)`.

    Example:
        >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """
    mean, targets = check_regression(mean, targets)
    return average((targets - mean).square(), weights).sqrt()


def gaussian_nll(
    mean: Tensor, scale: Tensor | float, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Negative log-likelihood of the targets under Gaussian predictions, in nats per entry.

    `mean [ ((y - mu) / sigma)^2 / 2 + log sigma + log(2 pi) / 2 ]`.

    Example:
        >>> gaussian_nll(torch.zeros(2), 1.0, torch.zeros(2))
        tensor(0.9189)
    """
    z, scale = _standardize(mean, scale, targets)
    return average(0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi), weights)


def crps_gaussian(
    mean: Tensor, scale: Tensor | float, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Continuous ranked probability score of Gaussian predictions, in the targets' units.

    `int (F(t) - 1[t >= y])^2 dt = sigma [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)]` with
    `z = (y - mu) / sigma`, averaged over entries. It becomes the absolute error as `sigma -> 0`.

    References:
        Gneiting and Raftery (2007), Strictly proper scoring rules, prediction, and estimation,
        section 4.2 (there with the opposite sign).

    Example:
        >>> crps_gaussian(torch.zeros(1), 1.0, torch.zeros(1))
        tensor(0.2337)
    """
    z, scale = _standardize(mean, scale, targets)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1 without cancellation at small z
    central = torch.erf(z / math.sqrt(2))
    return average(scale * (z * central + 2 * density - 1 / math.sqrt(math.pi)), weights)


def interval_coverage(
    mean: Tensor,
    scale: Tensor | float,
    targets: Tensor,
    level: float = 0.95,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Fraction of targets inside the central predictive interval of the given level.

    `mean 1[|y - mu| <= sigma Phi^{-1}((1 + level) / 2)]`: near `level` if well calibrated.

    Args:
        level: probability of the interval, in `(0, 1)`.

    Example:
        >>> interval_coverage(torch.zeros(4), 1.0, torch.tensor([-1.0, 0.0, 1.0, 3.0]))
        tensor(0.7500)
    """
    level = check.number("level", level, above=0, below=1, hint=": pass level=0.95 for 95 %")
    z, _ = _standardize(mean, scale, targets)
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    return average((z.abs() <= quantile).to(z.dtype), weights)


def _standardize(mean: Tensor, scale: Tensor | float, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return `z = (y - mu) / sigma` and `sigma`, checked."""
    mean, targets = check_regression(mean, targets)
    scale = check_scale(scale, mean)
    return (targets - mean) / scale, scale
