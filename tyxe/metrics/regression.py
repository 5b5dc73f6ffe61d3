"""Scores of predicted numbers: by Gaussians, intervals, samples, mixtures and draws.

Targets that are NaN are missing, and their numbers are left out of averages.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import average, check_real, check_regression, check_scale


def rmse(mean: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Root of the mean squared error, in the targets' units.

    `sqrt(mean (y - mu)^2)`.

    Example:
        >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """
    mean, targets, known = check_regression(mean, targets)
    return average((targets - mean).square(), weights, known).sqrt()


def gaussian_nll(
    mean: Tensor, scale: Tensor | float, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Negative log-likelihood of the targets under Gaussian predictions, in nats per entry.

    `mean [ ((y - mu) / sigma)^2 / 2 + log sigma + log(2 pi) / 2 ]`.

    Example:
        >>> gaussian_nll(torch.zeros(2), 1.0, torch.zeros(2))
        tensor(0.9189)
    """
    z, scale, known = _standardize(mean, scale, targets)
    return average(0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi), weights, known)


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
    z, scale, known = _standardize(mean, scale, targets)
    return average(scale * (_mean_absolute(z, 1.0) - 1 / math.sqrt(math.pi)), weights, known)


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
    z, _, known = _standardize(mean, scale, targets)
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    return average((z.abs() <= quantile).to(z.dtype), weights, known)


def lppd(log_likelihoods: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Log pointwise predictive density, in nats per point.

    `1/n sum_i log 1/S sum_s p(y_i | w_s)`, by the log-likelihood of each point under each draw.

    Args:
        log_likelihoods: shape `(S, n)`, as `evaluate(..., aggregate=False, reduction="none")[1]`.

    References:
        Gelman, Hwang and Vehtari (2014), Understanding predictive information criteria, eq. 5
        (there the sum).

    Example:
        >>> lppd(torch.tensor([[0.5, 0.1], [0.3, 0.1]]).log())
        tensor(-1.6094)
    """
    found = check_real("log_likelihoods", log_likelihoods)
    hint = ", a row for each draw: pass evaluate(..., aggregate=False, reduction='none')[1]"
    check.shape("log_likelihoods", found, ("S", "n"), hint)
    return average(found.logsumexp(0) - math.log(len(found)), weights)


def crps_samples(samples: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Continuous ranked probability score of samples, in the targets' units.

    `1/S sum_s |x_s - y| - 1/(2 S^2) sum_st |x_s - x_t|`, the score of their empirical
    distribution, averaged over entries. Time and memory are those of sorting.

    Args:
        samples: shape `(S, n, ...)`.

    References:
        Gneiting and Raftery (2007), section 4.2.

    Example:
        >>> crps_samples(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0]))
        tensor(0.2500)
    """
    samples, targets, known = _stacked("samples", samples, targets)
    count = len(samples)
    ranks = torch.arange(1, count + 1, device=samples.device, dtype=samples.dtype)
    # sum_st |x_s - x_t| = 2 sum_k (2 k - S - 1) x_(k)
    ordered, factor = samples.sort(0).values, (2 * ranks - count - 1) / count**2
    spread = (ordered.movedim(0, -1) * factor).sum(-1)
    return average((samples - targets).abs().mean(0) - spread, weights, known)


def crps_mixture(
    means: Tensor, scales: Tensor | float, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    r"""Continuous ranked probability score of an equal mixture of Gaussians, in closed form.

    `1/S sum_s E|x_s - y| - 1/(2 S^2) sum_st E|x_s - x_t|` with
    `E|N(m, s^2)| = m (2 Phi(m/s) - 1) + 2 s phi(m/s)`, averaged over entries.

    Args:
        means: means of the draws, shape `(S, n, ...)`.
        scales: their standard deviations, the shape of `means` or one number; positive.

    References:
        Grimit et al. (2006), The continuous ranked probability score for circular variables and its
        application to mesoscale forecast ensemble verification, eq. 5 (of the linear case).

    Example:
        >>> crps_mixture(torch.zeros(3, 1), 1.0, torch.zeros(1))
        tensor(0.2337)
    """
    means, targets, known = _stacked("means", means, targets)
    scales = check_scale(scales, means).expand_as(means)
    first = _mean_absolute(means - targets, scales).mean(0)
    spread = torch.zeros_like(first)
    for mean, own in zip(means, scales, strict=True):  # S^2 terms of n numbers, S at a time
        spread += _mean_absolute(means - mean, scales.hypot(own)).mean(0)
    return average(first - 0.5 * spread / len(means), weights, known)


def _mean_absolute(mean: Tensor, scale: Tensor | float) -> Tensor:
    """Return `E|N(m, s^2)|`."""
    z = mean / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1 without cancellation at small z
    return mean * torch.erf(z / math.sqrt(2)) + 2 * scale * density


def interval_score(
    lower: Tensor,
    upper: Tensor,
    targets: Tensor,
    level: float = 0.95,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Width of intervals plus a penalty for targets outside, in the targets' units.

    `(u - l) + 2/alpha (l - y)_+ + 2/alpha (y - u)_+` with `alpha = 1 - level`, averaged over
    entries; the quantiles at `alpha / 2` and `1 - alpha / 2` minimise its expectation.

    Args:
        lower, upper: ends of the intervals, shape `(n, ...)`.
        targets: observations, the same shape.
        level: probability that the intervals are meant to have, in `(0, 1)`.

    References:
        Gneiting and Raftery (2007), eq. 43.

    Example:
        >>> interval_score(torch.zeros(2), torch.ones(2), torch.tensor([0.5, 2.0]), level=0.5)
        tensor(3.)
    """
    level = check.number("level", level, above=0, below=1, hint=": pass level=0.95 for 95 %")
    lower, y, known = check_regression(lower, targets)
    upper, *_ = check_regression(upper, targets)
    outside = (lower - y).clamp_min(0) + (y - upper).clamp_min(0)
    return average(upper - lower + 2 / (1 - level) * outside, weights, known)


def gaussian_pit(mean: Tensor, scale: Tensor | float, targets: Tensor) -> Tensor:
    r"""Probability integral transform of targets, `Phi((y - mu) / sigma)`, of the targets' shape.

    Uniform if the predictions are calibrated, and NaN where a target is. Arguments and errors are
    those of `gaussian_nll`.

    Example:
        >>> gaussian_pit(torch.zeros(2), 1.0, torch.tensor([0.0, 1.0]))
        tensor([0.5000, 0.8413])
    """
    z, _, known = _standardize(mean, scale, targets)
    return (0.5 * torch.erfc(-z / math.sqrt(2))).where(known, torch.nan)


def sample_pit(samples: Tensor, targets: Tensor) -> Tensor:
    r"""Probability integral transform of targets `(n, ...)` by samples `(S, n, ...)`.

    `(#{x_s < y} + 1/2 #{x_s = y} + 1/2) / (S + 1)`, within `(0, 1)`, and NaN where a target is.

    Example:
        >>> sample_pit(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([1.5]))
        tensor([0.6250])
    """
    samples, targets, known = _stacked("samples", samples, targets)
    below = (samples < targets).sum(0) + 0.5 * (samples == targets).sum(0)
    found = ((below + 0.5) / (len(samples) + 1)).to(samples.dtype)
    return found.where(known, torch.nan)


def quantile_calibration_error(
    pit: Tensor, num_levels: int = 19, weights: Tensor | None = None
) -> Tensor:
    r"""Distance of quantiles' coverage from their levels, `1/L sum_l |mean 1[u <= q_l] - q_l|`.

    Args:
        pit: result of `gaussian_pit` or `sample_pit`, shape `(n, ...)`.
        num_levels: number `L` of levels `l / (L + 1)`.

    References:
        Kuleshov, Fenner and Ermon (2018), Accurate uncertainties for deep learning using calibrated
        regression, eq. 9 (there squared).

    Example:
        >>> quantile_calibration_error(torch.tensor([0.1, 0.3, 0.5, 0.7]), num_levels=3)
        tensor(0.1667)
    """
    pit, num_levels = check_real("pit", pit, missing=True), check.count("num_levels", num_levels)
    known = ~pit.isnan()
    expected = "probabilities: pass gaussian_pit(mean, scale, targets)"
    check.numbers("pit", pit[known], expected, least=0, most=1)
    levels = torch.arange(1, num_levels + 1, dtype=pit.dtype, device=pit.device) / (num_levels + 1)
    covered = [average((pit <= level).to(pit.dtype), weights, known) for level in levels]
    return (torch.stack(covered) - levels).abs().mean()


def _stacked(name: str, values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of draws `(S, n, ...)` and the rest of `check_regression` in one dtype."""
    hint = ", one for each draw: pass predict(..., aggregate=False), or sample_predictive(...)"
    values = check.shape(name, check_real(name, values), ("S", "n", ...), hint)
    first, targets, known = check_regression(values[0], targets)
    return values.to(first.dtype), targets, known


def _standardize(
    mean: Tensor, scale: Tensor | float, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `z = (y - mu) / sigma`, `sigma` and which targets are known, checked."""
    mean, targets, known = check_regression(mean, targets)
    scale = check_scale(scale, mean)
    return (targets - mean) / scale, scale, known
