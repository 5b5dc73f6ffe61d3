"""The tail of importance ratios, by which an approximation is judged as a density."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import check_real

FEWEST = 5


def pareto_k(log_ratios: Tensor) -> float:
    """Return the shape of the generalised Pareto distribution that the largest ratios follow.

    Above 1/2 the ratios have no variance, above 1 no mean; below 0.7 importance sampling by the
    approximation works with as many draws as one has. In hundreds of dimensions it is above 0.7
    for nearly every approximation, which then says nothing about its predictions. It is minus
    infinity where the largest ratios differ by rounding alone, as those of an exact posterior do,
    and infinity where fewer than five are above 0 beside the largest.

    Args:
        log_ratios: `log p(w_s, D) - log q(w_s)` of draws from `q`, up to a constant, `(S,)`.

    Raises:
        ValueError: fewer than 25 ratios, or ratios that are not finite.

    References:
        Yao, Vehtari, Simpson, Gelman 2018, Yes, but did it work?; Vehtari et al. 2024, Pareto
        smoothed importance sampling; Zhang and Stephens 2009, for the estimate.

    Example:
        >>> pareto_k(torch.arange(1, 1000) / 1000 * 0) < 0.1
        True
    """
    ratios = check_real("log_ratios", log_ratios).double()
    check.shape("log_ratios", ratios, ("S",))
    if not bool(ratios.isfinite().all()):
        raise ValueError("log_ratios has infinite entries; expected finite numbers")
    size = len(ratios)
    tail = math.ceil(min(0.2 * size, 3 * size**0.5))
    if tail < FEWEST:
        raise ValueError(f"there are {size} ratios; expected 25 or more, better 1,000")
    # As logarithms below the largest.
    values = (ratios - ratios.max()).sort().values
    threshold = float(values[-tail - 1])
    rounding = 8 * torch.finfo(log_ratios.dtype).eps * max(1.0, float(ratios.abs().max()))
    if -threshold <= rounding:
        return -math.inf
    excess = (values[-tail:].exp() - math.exp(threshold)).clamp_min(0)
    smallest = torch.finfo(excess.dtype).tiny
    excess = excess[excess > smallest]
    is_underflow = threshold < math.log(smallest)
    return math.inf if is_underflow and len(excess) < FEWEST else _shape(excess / excess[-1])


def _shape(excess: Tensor) -> float:
    """Return the shape by the quasi-Bayesian estimate of Zhang and Stephens, shrunk to 1/2.

    Args:
        excess: what ratios have above a threshold, increasing up to 1.
    """
    count = len(excess)
    points = 30 + int(count**0.5)
    grid = torch.arange(1, points + 1, dtype=torch.float64, device=excess.device)
    quartile = excess[(count + 2) // 4 - 1]
    theta = 1 + (1 - (points / (grid - 0.5)).sqrt()) / (3 * quartile)
    shapes = torch.log1p(-theta[:, None] * excess).mean(1)
    # Its limit where theta is 0, of exponential tails.
    rate = torch.where(theta == 0, 1 / excess.mean(), -theta / shapes)
    profile = count * (rate.log() - shapes - 1)
    best = (profile.softmax(0) * theta).sum()
    shape = float(torch.log1p(-best * excess).mean())
    return (shape * count + 0.5 * 10) / (count + 10)
