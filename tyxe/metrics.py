"""Scores of predictions: classification, out-of-distribution detection and regression.

Classification metrics take class probabilities of shape `(n, C)` and integer targets of shape
`(n,)`. Regression metrics take a Gaussian's `mean` and `scale` and the `targets`, all of one shape
`(n, ...)`, and average over every entry. Results are 0-d tensors on the inputs' device unless a
function says otherwise; float16 and bfloat16 are computed, and returned, in float32.

Every function checks its inputs and raises `TypeError` for what is no floating-point (targets of
classes: integer) tensor, and `ValueError` for NaNs, empty inputs, shapes or devices that do not
match, rows of probabilities that are negative or do not sum to one, and classes out of range.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CalibrationCurve",
    "accuracy",
    "brier_score",
    "calibration_curve",
    "crps_gaussian",
    "expected_calibration_error",
    "gaussian_nll",
    "interval_coverage",
    "nll",
    "ood_aupr",
    "ood_auroc",
    "predictive_entropy",
    "rmse",
]


class CalibrationCurve(NamedTuple):
    """Confidence against accuracy in the `k` bins that hold a point, by increasing confidence.

    Attributes:
        confidence: mean of the maximal probability in each bin, shape `(k,)`.
        accuracy: fraction of points whose most probable class is right, shape `(k,)`.
        counts: number of points in each bin, int64, shape `(k,)`; they sum to `n`.
    """

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def nll(probs: Tensor, targets: Tensor) -> Tensor:
    r"""Negative log-likelihood of the targets, in nats per point.

    `-1/n sum_i log p_i(y_i)`. For a Bayesian average pass the *averaged* probabilities, so that
    the mean is taken before the logarithm. A target of probability zero makes it infinite.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.

    Returns:
        A 0-d tensor, non-negative.

    Raises:
        TypeError: for targets that are not integer, or probabilities that are not floating point.
        ValueError: for anything else the module's docstring lists.

    Example:
        >>> nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1]))
        tensor(0.4904)
    """
    probs, targets = _classified(probs, targets)
    return -_at_targets(probs, targets).log().mean()


def accuracy(probs: Tensor, targets: Tensor) -> Tensor:
    r"""Fraction of points whose most probable class is the target.

    `1/n sum_i 1[argmax_c p_i(c) = y_i]`; the error is one minus it.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.

    Returns:
        A 0-d tensor in `[0, 1]`.

    Raises:
        TypeError, ValueError: as in `nll`.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    probs, targets = _classified(probs, targets)
    return (probs.argmax(-1) == targets).to(probs.dtype).mean()


def brier_score(probs: Tensor, targets: Tensor) -> Tensor:
    r"""Squared distance between the probabilities and the one-hot target, summed over classes.

    `1/n sum_i sum_c (p_i(c) - 1[y_i = c])^2`: in `[0, 2]`, twice the form that is usual for two
    classes.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.

    Returns:
        A 0-d tensor in `[0, 2]`.

    Raises:
        TypeError, ValueError: as in `nll`.

    References:
        Brier (1950), Verification of forecasts expressed in terms of probability.

    Example:
        >>> brier_score(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.5000)
    """
    probs, targets = _classified(probs, targets)
    one_hot = torch.nn.functional.one_hot(targets, probs.shape[-1])
    return (probs - one_hot).square().sum(-1).mean()


def calibration_curve(probs: Tensor, targets: Tensor, num_bins: int = 15) -> CalibrationCurve:
    r"""Mean confidence and accuracy in equal-width bins of the maximal probability.

    Bin `b` of `B` holds the points with `max_c p(c)` in `(b/B, (b+1)/B]`. Bins that hold no point
    are left out, so that the result can be drawn and summed as it is.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.
        num_bins: number `B` of bins of `[0, 1]`.

    Returns:
        A `CalibrationCurve` of `k <= num_bins` bins.

    Raises:
        TypeError, ValueError: as in `nll`; also if `num_bins` is below one.

    References:
        Guo et al. (2017), On calibration of modern neural networks, section 2.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> calibration_curve(probs, torch.tensor([0, 0, 0, 1])).accuracy
        tensor([0.7500])
    """
    probs, targets = _classified(probs, targets)
    if num_bins < 1:
        raise ValueError(f"`num_bins` is {num_bins}, expected at least 1: pass num_bins=15")
    confidence, predicted = probs.max(-1)
    edges = torch.linspace(0, 1, num_bins + 1, dtype=probs.dtype, device=probs.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    correct = predicted == targets
    counts = _bin_sums(torch.ones_like(bins), bins, num_bins)
    filled = counts > 0
    # float64: single precision loses digits in sums over many points
    sums = torch.stack([_bin_sums(v.double(), bins, num_bins) for v in (confidence, correct)])
    means = (sums[:, filled] / counts[filled]).to(probs.dtype)
    return CalibrationCurve(means[0], means[1], counts[filled])


def expected_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 15) -> Tensor:
    r"""Gap between confidence and accuracy, averaged over the bins of `calibration_curve`.

    `sum_b |B_b|/n |acc(B_b) - conf(B_b)|`.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.
        num_bins: number of equal-width bins of the maximal probability.

    Returns:
        A 0-d tensor in `[0, 1]`.

    Raises:
        TypeError, ValueError: as in `calibration_curve`.

    References:
        Guo et al. (2017), On calibration of modern neural networks, eq. 3.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> expected_calibration_error(probs, torch.tensor([0, 0, 1, 1]))
        tensor(0.2500)
    """
    curve = calibration_curve(probs, targets, num_bins)
    gaps = (curve.accuracy - curve.confidence).abs()
    return (curve.counts * gaps).sum() / curve.counts.sum()


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy of each point's class probabilities, in nats.

    `-sum_c p(c) log p(c)` with `0 log 0 = 0`: from 0 (certain) to `log C` (uniform).

    Args:
        probs: class probabilities, shape `(n, C)`.

    Returns:
        Entropies, shape `(n,)`.

    Raises:
        TypeError, ValueError: as in `nll`.

    Example:
        >>> predictive_entropy(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([0.6931, 0.0000])
    """
    entropy: Tensor = torch.special.entr(_check_probs(probs)).sum(-1)
    return entropy


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> Tensor:
    r"""Area under the ROC curve when in-distribution is the positive class.

    `P(s_in > s_out) + P(s_in = s_out) / 2`. Higher scores mean "more in-distribution": pass
    `probs.amax(-1)` or `-predictive_entropy(probs)`. Time is that of sorting, memory linear.

    Args:
        in_scores: scores of the in-distribution points, shape `(n,)`.
        out_scores: scores of the out-of-distribution points, shape `(m,)`.

    Returns:
        A 0-d tensor in `[0, 1]`; 0.5 is chance.

    Raises:
        TypeError: for scores that are not floating-point tensors.
        ValueError: for scores that are empty, not of rank one, NaN or on two devices.

    References:
        Hendrycks and Gimpel (2017), A baseline for detecting misclassified and
        out-of-distribution examples.

    Example:
        >>> ood_auroc(torch.tensor([0.9, 0.6]), torch.tensor([0.6, 0.5]))
        tensor(0.8750)
    """
    in_scores, out_scores = _check_scores(in_scores, out_scores)
    sorted_out = out_scores.sort().values
    below = torch.searchsorted(sorted_out, in_scores)
    not_above = torch.searchsorted(sorted_out, in_scores, right=True)
    # integers up to the division: the sum is exact, ties count half of two
    doubled = (below + not_above).sum()
    return (doubled.double() / (2 * len(in_scores) * len(out_scores))).to(in_scores.dtype)


def ood_aupr(in_scores: Tensor, out_scores: Tensor) -> Tensor:
    r"""Area under the precision-recall curve (average precision), in-distribution positive.

    `1/n sum_i precision(s_i)`, `precision(s) = #{s_in >= s} / (#{s_in >= s} + #{s_out >= s})`,
    which is the step-wise `sum_k (R_k - R_{k-1}) P_k`. Chance is `n / (n + m)`.

    Args:
        in_scores: scores of the in-distribution points, shape `(n,)`; higher is "more in".
        out_scores: scores of the out-of-distribution points, shape `(m,)`.

    Returns:
        A 0-d tensor in `(0, 1]`.

    Raises:
        TypeError, ValueError: as in `ood_auroc`.

    Example:
        >>> ood_aupr(torch.tensor([0.9, 0.6]), torch.tensor([0.7, 0.5]))
        tensor(0.8333)
    """
    in_scores, out_scores = _check_scores(in_scores, out_scores)
    true_positives = _num_at_least(in_scores, in_scores)
    false_positives = _num_at_least(out_scores, in_scores)
    precision = true_positives.double() / (true_positives + false_positives)
    return precision.mean().to(in_scores.dtype)


def rmse(mean: Tensor, targets: Tensor) -> Tensor:
    r"""Root of the mean squared error, in the targets' units.

    `sqrt(mean (y - mu)^2)`.

    Args:
        mean: predictions, shape `(n, ...)`.
        targets: observations, the shape of `mean`.

    Returns:
        A 0-d tensor, non-negative.

    Raises:
        TypeError: for inputs that are not floating-point tensors.
        ValueError: for inputs that are empty, NaN, or of different shapes or devices.

    Example:
        >>> rmse(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """
    mean, targets = _check_regression(mean, targets)
    return (targets - mean).square().mean().sqrt()


def gaussian_nll(mean: Tensor, scale: Tensor | float, targets: Tensor) -> Tensor:
    r"""Negative log-likelihood of the targets under Gaussian predictions, in nats per entry.

    `mean [ ((y - mu) / sigma)^2 / 2 + log sigma + log(2 pi) / 2 ]`.

    Args:
        mean: predictive means, shape `(n, ...)`.
        scale: predictive standard deviations, the shape of `mean` or one number; positive.
        targets: observations, the shape of `mean`.

    Returns:
        A 0-d tensor.

    Raises:
        TypeError, ValueError: as in `rmse`; also if a scale is not positive and finite.

    Example:
        >>> gaussian_nll(torch.zeros(2), 1.0, torch.zeros(2))
        tensor(0.9189)
    """
    z, scale = _standardize(mean, scale, targets)
    return (0.5 * z.square() + scale.log() + 0.5 * math.log(2 * math.pi)).mean()


def crps_gaussian(mean: Tensor, scale: Tensor | float, targets: Tensor) -> Tensor:
    r"""Continuous ranked probability score of Gaussian predictions, in the targets' units.

    `int (F(t) - 1[t >= y])^2 dt = sigma [z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)]` with
    `z = (y - mu) / sigma`, averaged over entries. It becomes the absolute error as `sigma -> 0`.

    Args:
        mean: predictive means, shape `(n, ...)`.
        scale: predictive standard deviations, the shape of `mean` or one number; positive.
        targets: observations, the shape of `mean`.

    Returns:
        A 0-d tensor, non-negative.

    Raises:
        TypeError, ValueError: as in `gaussian_nll`.

    References:
        Gneiting and Raftery (2007), Strictly proper scoring rules, prediction, and estimation,
        section 4.2 (there with the opposite sign).

    Example:
        >>> crps_gaussian(torch.zeros(1), 1.0, torch.zeros(1))
        tensor(0.2337)
    """
    z, scale = _standardize(mean, scale, targets)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1, without cancellation at small z
    central = torch.erf(z / math.sqrt(2))
    return (scale * (z * central + 2 * density - 1 / math.sqrt(math.pi))).mean()


def interval_coverage(
    mean: Tensor, scale: Tensor | float, targets: Tensor, level: float = 0.95
) -> Tensor:
    r"""Fraction of targets inside the central predictive interval of the given level.

    `mean 1[|y - mu| <= sigma Phi^{-1}((1 + level) / 2)]`: near `level` if well calibrated.

    Args:
        mean: predictive means, shape `(n, ...)`.
        scale: predictive standard deviations, the shape of `mean` or one number; positive.
        targets: observations, the shape of `mean`.
        level: probability of the interval, in `(0, 1)`.

    Returns:
        A 0-d tensor in `[0, 1]`.

    Raises:
        TypeError, ValueError: as in `gaussian_nll`; also if `level` is not in `(0, 1)`.

    Example:
        >>> interval_coverage(torch.zeros(4), 1.0, torch.tensor([-1.0, 0.0, 1.0, 3.0]))
        tensor(0.7500)
    """
    if not 0 < level < 1:
        raise ValueError(f"`level` is {level}, expected within (0, 1): pass level=0.95 for 95 %")
    z, _ = _standardize(mean, scale, targets)
    quantile = NormalDist().inv_cdf((1 + level) / 2)
    return (z.abs() <= quantile).to(z.dtype).mean()


def _at_targets(probs: Tensor, targets: Tensor) -> Tensor:
    return probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _bin_sums(values: Tensor, bins: Tensor, num_bins: int) -> Tensor:
    return values.new_zeros(num_bins).index_add(0, bins, values)


def _num_at_least(scores: Tensor, thresholds: Tensor) -> Tensor:
    return len(scores) - torch.searchsorted(scores.sort().values, thresholds)


def _standardize(mean: Tensor, scale: Tensor | float, targets: Tensor) -> tuple[Tensor, Tensor]:
    """`z = (y - mu) / sigma` and `sigma`, checked."""
    mean, targets = _check_regression(mean, targets)
    scale = _check_scale(scale, mean)
    return (targets - mean) / scale, scale


def check_real(name: str, value: Tensor) -> Tensor:
    """Return the tensor in float32 at least, if it is floating point, not empty, without NaNs."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"`{name}` is of type {type(value).__name__}, expected a tensor: "
            f"pass torch.as_tensor({name})"
        )
    if not value.is_floating_point():
        raise TypeError(
            f"`{name}` has dtype {value.dtype}, expected floating point: pass {name}.float()"
        )
    if value.numel() == 0:
        raise ValueError(
            f"`{name}` is empty, of shape {tuple(value.shape)}, expected at least one point: "
            "collect the batches with torch.cat(batches)"
        )
    if value.isnan().any():
        raise ValueError(
            f"`{name}` has {int(value.isnan().sum())} NaN entries, expected none: "
            f"find them with {name}.isnan().nonzero()"
        )
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _check_probs(probs: Tensor) -> Tensor:
    checked = check_real("probs", probs)
    if probs.dim() != 2 or probs.shape[-1] < 2:
        raise ValueError(
            f"`probs` has shape {tuple(probs.shape)}, expected (n, C) with C >= 2: pass "
            "probs.mean(0) for stacked draws, torch.stack([1 - p, p], -1) for probabilities `p` "
            "of one class"
        )
    if (checked < 0).any():
        raise ValueError(
            f"`probs` has negative entries, the smallest {checked.min():.4g}, expected "
            "probabilities: pass logits.softmax(-1), or log_probs.exp()"
        )
    sums = checked.sum(-1)
    # rounding to half precision alone moves a sum by up to eps / 2
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)
    if not ((sums - 1).abs() <= tolerance).all():
        raise ValueError(
            f"the rows of `probs` sum to between {sums.min():.4g} and {sums.max():.4g}, expected "
            "1: pass logits.softmax(-1), or probs / probs.sum(-1, keepdim=True)"
        )
    return checked


def _check_targets(targets: Tensor, probs: Tensor) -> Tensor:
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"`targets` is of type {type(targets).__name__}, expected an integer tensor: "
            "pass torch.as_tensor(targets)"
        )
    if targets.shape != probs.shape[:1]:
        raise ValueError(
            f"`targets` has shape {tuple(targets.shape)}, expected ({len(probs)},) for `probs` "
            f"of shape {tuple(probs.shape)}: pass targets.squeeze(-1), or targets.argmax(-1) if "
            "they are one-hot"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(
            f"`targets` has dtype {targets.dtype}, expected integer: pass targets.long()"
        )
    _check_device("targets", targets, "probs", probs)
    targets = targets.long()
    low, high, num_classes = int(targets.min()), int(targets.max()), probs.shape[-1]
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"`targets` range over {low}..{high}, expected 0..{num_classes - 1} for "
            f"{num_classes} classes: pass targets - targets.min() if they start elsewhere, and "
            "leave out ignored points"
        )
    return targets


def _classified(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    probs = _check_probs(probs)
    return probs, _check_targets(targets, probs)


def _check_scores(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        if check_real(name, scores).dim() != 1:
            raise ValueError(
                f"`{name}` has shape {tuple(scores.shape)}, expected (n,): "
                "pass probs.amax(-1), or -predictive_entropy(probs)"
            )
    _check_device("out_scores", out_scores, "in_scores", in_scores)
    in_scores, out_scores = _promoted(in_scores, out_scores)
    # searchsorted warns of strided scores, such as a column of `probs`
    return in_scores.contiguous(), out_scores.contiguous()


def _check_regression(mean: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    mean, targets = check_real("mean", mean), check_real("targets", targets)
    if mean.dim() == 0:
        raise ValueError("`mean` has shape (), expected (n, ...): pass mean.unsqueeze(0)")
    _check_same_shape("targets", targets, mean)
    return _promoted(mean, targets)


def _check_scale(scale: Tensor | float, mean: Tensor) -> Tensor:
    if isinstance(scale, int | float):
        scale = torch.tensor(float(scale), dtype=mean.dtype)
    scale = check_real("scale", scale)
    if scale.dim() > 0:
        _check_same_shape("scale", scale, mean)
    else:
        scale = scale.to(mean.device)
    if not ((scale > 0) & scale.isfinite()).all():
        raise ValueError(
            f"`scale` ranges from {scale.min():.4g} to {scale.max():.4g}, expected positive and "
            "finite standard deviations: pass log_scale.exp(), or variance.sqrt()"
        )
    return scale


def _check_same_shape(name: str, value: Tensor, mean: Tensor) -> None:
    if value.shape != mean.shape:
        call = f"{name}.reshape(mean.shape)"
        if value.numel() != mean.numel():
            call = f"{name}.expand_as(mean), or as many {name} as predictions"
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, expected {tuple(mean.shape)}, that of "
            f"`mean`: pass {call}"
        )
    _check_device(name, value, "mean", mean)


def _check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"`{name}` is on {value.device}, expected {other.device}, that of `{other_name}`: "
            f"pass {name}.to({other_name}.device)"
        )


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in their common dtype, float32 at least."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype), b.to(dtype)
