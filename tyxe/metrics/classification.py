"""Scores of class probabilities, and of how points are ranked."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import (
    average,
    check_classified,
    check_probs,
    check_real,
    check_scores,
    check_weights,
)


class CalibrationCurve(NamedTuple):
    """Confidence against accuracy in the `k` bins that hold a point, by increasing confidence.

    Attributes:
        confidence: mean of the maximal probability in each bin, shape `(k,)`.
        accuracy: fraction of points whose most probable class is right, shape `(k,)`.
        counts: number of points in each bin, or sum of weights, shape `(k,)`.
    """

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def nll(probs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Negative log-likelihood of the targets, in nats per point.

    `-1/n sum_i log p_i(y_i)`. For a Bayesian average pass the *averaged* probabilities, so that
    the mean is taken before the logarithm. A target of probability zero makes it infinite.
    Targets may be probabilities of classes, `(n, C)`: `-1/n sum_i sum_c q_i(c) log p_i(c)`.

    Example:
        >>> nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1]))
        tensor(0.4904)
    """
    probs, targets = check_classified(probs, targets, soft=True)
    if targets.dim() == 2:
        return -average(torch.special.xlogy(targets, probs).sum(-1), weights)
    return -average(probs.gather(-1, targets[:, None])[:, 0].log(), weights)


def accuracy(probs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Fraction of points whose most probable class is the target.

    `1/n sum_i 1[argmax_c p_i(c) = y_i]`; the error is one minus it.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    probs, targets = check_classified(probs, targets)
    return average((probs.argmax(-1) == targets).to(probs.dtype), weights)


def brier_score(probs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Squared distance between the probabilities and the one-hot target, summed over classes.

    `1/n sum_i sum_c (p_i(c) - 1[y_i = c])^2`: in `[0, 2]`, twice the form that is usual for two
    classes. Targets may be probabilities of classes, `(n, C)`, in the place of the one-hot ones.

    References:
        Brier (1950), Verification of forecasts expressed in terms of probability.

    Example:
        >>> brier_score(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.5000)
    """
    probs, targets = check_classified(probs, targets, soft=True)
    if targets.dim() == 1:
        targets = torch.nn.functional.one_hot(targets, probs.shape[-1])
    return average((probs - targets).square().sum(-1), weights)


def calibration_curve(
    probs: Tensor,
    targets: Tensor,
    num_bins: int = 15,
    equal_mass: bool = False,
    weights: Tensor | None = None,
) -> CalibrationCurve:
    r"""Mean confidence and accuracy in bins of the maximal probability.

    Bin `b` of `B` holds the points with `max_c p(c)` in `(b/B, (b+1)/B]`. Empty bins are left out,
    so the result can be drawn and summed directly.

    Args:
        num_bins: number `B` of bins of `[0, 1]`.
        equal_mass: let all bins have equally many points, up to one, by increasing `max_c p(c)`.
            Points with the same confidence share their bins evenly; fractional weights are split
            between bins.

    Returns:
        A `CalibrationCurve` of `k <= num_bins` bins.

    References:
        Guo et al. (2017), On calibration of modern neural networks, section 2.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> calibration_curve(probs, torch.tensor([0, 0, 0, 1])).accuracy
        tensor([0.7500])
    """
    probs, targets = check_classified(probs, targets)
    num_bins = check.count("num_bins", num_bins)
    confidence, predicted = probs.max(-1)
    mass = torch.ones_like(targets) if weights is None else check_weights(weights, probs)
    # in float64, because single precision loses digits in sums over many points
    each = mass.double() * torch.stack(
        [torch.ones_like(mass), confidence.double(), predicted == targets]
    )
    bins = _equal_mass_sums if check.flag("equal_mass", equal_mass) else _equal_width_sums
    counts, *sums = bins(confidence, each, num_bins)
    filled = counts > 0
    means = (torch.stack(sums)[:, filled] / counts[filled]).to(probs.dtype)
    return CalibrationCurve(means[0], means[1], counts[filled].to(mass.dtype))


def expected_calibration_error(
    probs: Tensor, targets: Tensor, num_bins: int = 15, weights: Tensor | None = None
) -> Tensor:
    r"""Gap between confidence and accuracy, averaged over the bins of `calibration_curve`.

    `sum_b |B_b|/n |acc(B_b) - conf(B_b)|`.

    Args:
        num_bins: number of equal-width bins of the maximal probability.

    References:
        Guo et al. (2017), On calibration of modern neural networks, eq. 3.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> expected_calibration_error(probs, torch.tensor([0, 0, 1, 1]))
        tensor(0.2500)
    """
    return _gap(calibration_curve(probs, targets, num_bins, weights=weights))


def adaptive_calibration_error(
    probs: Tensor, targets: Tensor, num_bins: int = 15, weights: Tensor | None = None
) -> Tensor:
    r"""Gap between confidence and accuracy, averaged over bins of equally many points.

    Arguments and errors are those of `expected_calibration_error`, whose bins are mostly empty if
    most points are predicted with certainty.

    References:
        Nguyen and O'Connor (2015), Posterior calibration and exploratory analysis for natural
        language processing models; Nixon et al. (2019), Measuring calibration in deep learning.

    Example:
        >>> probs = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]])
        >>> adaptive_calibration_error(probs, torch.tensor([1, 0, 0, 0]), num_bins=2)
        tensor(0.1500)
    """
    return _gap(calibration_curve(probs, targets, num_bins, equal_mass=True, weights=weights))


def _gap(curve: CalibrationCurve) -> Tensor:
    gaps = (curve.accuracy - curve.confidence).abs()
    return (curve.counts * gaps).sum() / curve.counts.sum()


def predictive_entropy(probs: Tensor) -> Tensor:
    r"""Entropy of each point's class probabilities, in nats.

    `-sum_c p(c) log p(c)` with `0 log 0 = 0`: from 0 (certain) to `log C` (uniform).

    Returns:
        Entropies, shape `(n,)`.

    Example:
        >>> predictive_entropy(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([0.6931, 0.0000])
    """
    return torch.special.entr(check_probs(probs)).sum(-1)


def _equal_width_sums(confidence: Tensor, each: Tensor, num_bins: int) -> Tensor:
    """Return the sums `(3, B)` of numbers of points `(3, n)` in bins of the confidence."""
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    return each.new_zeros(len(each), num_bins).index_add(1, bins, each)


def _equal_mass_sums(confidence: Tensor, each: Tensor, num_bins: int) -> Tensor:
    """Return the sums `(3, B)` of numbers of points `(3, n)`, the first their mass, in bins of it.

    They are differences of cumulative sums, which are linear in the mass of one confidence.
    """
    counted = each[0] > 0
    values, group = confidence[counted].unique(return_inverse=True)
    sums = each.new_zeros(len(each), len(values) + 1).index_add(1, group + 1, each[:, counted])
    sums = sums.cumsum(1)
    edges = sums[0, -1] * torch.arange(num_bins + 1, device=each.device) / num_bins
    if bool((each[0] == each[0].round()).all()):
        edges = edges.ceil()  # no point is cut
    right = torch.searchsorted(sums[0], edges).clamp_min(1)
    below, above = sums[:, right - 1], sums[:, right]
    share = (edges - below[0]) / (above[0] - below[0])
    found = below.lerp(above, share)
    found[0] = edges  # which rounding could move
    return found.diff()


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> Tensor:
    r"""Area under the ROC curve when in-distribution is the positive class.

    `P(s_in > s_out) + P(s_in = s_out) / 2`. Higher scores mean "more in-distribution": pass
    `probs.amax(-1)`, `-predictive_entropy(probs)` or `-bnn.ood_score(x)`. Chance is 0.5. Time is
    that of sorting, memory linear.

    References:
        Hendrycks and Gimpel (2017), A baseline for detecting misclassified and
        out-of-distribution examples.

    Example:
        >>> ood_auroc(torch.tensor([0.9, 0.6]), torch.tensor([0.6, 0.5]))
        tensor(0.8750)
    """
    in_scores, out_scores = check_scores(in_scores, out_scores)
    sorted_out = out_scores.sort().values
    below = torch.searchsorted(sorted_out, in_scores)
    not_above = torch.searchsorted(sorted_out, in_scores, right=True)
    # integers until the division, so that the sum is exact; ties count half
    doubled = (below + not_above).sum()
    return (doubled.double() / (2 * len(in_scores) * len(out_scores))).to(in_scores.dtype)


def ood_aupr(in_scores: Tensor, out_scores: Tensor) -> Tensor:
    r"""Area under the precision-recall curve (average precision), in-distribution positive.

    `1/n sum_i precision(s_i)`, `precision(s) = #{s_in >= s} / (#{s_in >= s} + #{s_out >= s})`,
    which is the step-wise `sum_k (R_k - R_{k-1}) P_k`. Chance is `n / (n + m)`.

    Example:
        >>> ood_aupr(torch.tensor([0.9, 0.6]), torch.tensor([0.7, 0.5]))
        tensor(0.8333)
    """
    in_scores, out_scores = check_scores(in_scores, out_scores)
    true_positives = _num_at_least(in_scores, in_scores)
    false_positives = _num_at_least(out_scores, in_scores)
    precision = true_positives.double() / (true_positives + false_positives)
    return precision.mean().to(in_scores.dtype)


def fpr_at_tpr(in_scores: Tensor, out_scores: Tensor, tpr: float = 0.95) -> Tensor:
    r"""Fraction of out-of-distribution points kept if a share of in-distribution ones is kept.

    `#{s_out >= t} / m` for the highest threshold `t` with `#{s_in >= t} / n >= tpr`.

    Args:
        tpr: the share, in `(0, 1]`.

    Example:
        >>> fpr_at_tpr(torch.tensor([0.9, 0.8, 0.6, 0.5]), torch.tensor([0.7, 0.1]), tpr=0.75)
        tensor(0.5000)
    """
    in_scores, out_scores = check_scores(in_scores, out_scores)
    tpr = check.number("tpr", tpr, above=0, most=1, hint=": pass tpr=0.95 for 95 %")
    needed = math.ceil(tpr * len(in_scores) - 1e-9)  # a product such as 0.95 * 100 is rounded
    threshold = in_scores.sort(descending=True).values[needed - 1]
    return (out_scores >= threshold).to(in_scores.dtype).mean()


def _num_at_least(scores: Tensor, thresholds: Tensor) -> Tensor:
    return len(scores) - torch.searchsorted(scores.sort().values, thresholds)


class RiskCoverage(NamedTuple):
    """Error among the points that are kept, by their number.

    Attributes:
        coverage: fraction of points that are kept, `1/n` to 1, shape `(n,)`.
        risk: error of these, shape `(n,)`.
    """

    coverage: Tensor
    risk: Tensor


def risk_coverage_curve(
    probs: Tensor,
    targets: Tensor,
    confidence: Tensor | None = None,
    weights: Tensor | None = None,
) -> RiskCoverage:
    r"""Error of the most confident points, one more at a time.

    For points of the same confidence, the risk is the mean over all their orders.

    Args:
        confidence: the score to keep points by, shape `(n,)`; by default the maximal probability.
        weights: how often each point counts, whole numbers, shape `(n,)`; by default once.

    References:
        El-Yaniv and Wiener (2010), On the foundations of noise-free selective classification.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.7, 0.3]])
        >>> risk_coverage_curve(probs, torch.tensor([0, 1, 0, 1])).risk
        tensor([0.0000, 0.0000, 0.3333, 0.5000])
    """
    wrong, given, counts = _checked(probs, targets, confidence, weights)
    if counts is not None:
        if (counts != counts.long()).any():
            raise ValueError("weights has fractions, and a curve has whole points: round them")
        wrong, given = (part.repeat_interleave(counts.long()) for part in (wrong, given))
    values, order = given.sort(descending=True)
    errors = wrong[order].double()
    _, group = torch.unique_consecutive(values, return_inverse=True)
    sums = errors.new_zeros(int(group[-1]) + 1).index_add(0, group, errors)
    mean = (sums / group.bincount())[group]
    count = torch.arange(1, len(mean) + 1, device=mean.device)
    risk = mean.cumsum(0) / count
    dtype = torch.promote_types(probs.dtype, torch.float32)
    return RiskCoverage((count / len(mean)).to(dtype), risk.to(dtype))


def _checked(
    probs: Tensor, targets: Tensor, confidence: Tensor | None, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return which points are wrong, their confidences, and how often they count."""
    probs, targets = check_classified(probs, targets)
    confidence = probs.amax(-1) if confidence is None else check.tensor("confidence", confidence)
    given = confidence.double()
    hint = ": pass probs.amax(-1), or -predictive_entropy(probs)"
    check.shape("confidence", check_real("confidence", given), targets.shape, hint)
    counts = None if weights is None else check_weights(weights, probs)
    return probs.argmax(-1) != targets, given, counts


def aurc(
    probs: Tensor,
    targets: Tensor,
    confidence: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Area under the risk-coverage curve, `1/n sum_k risk_k`; lower is better.

    Arguments and errors are those of `risk_coverage_curve`; weights may have fractions here.

    References:
        Geifman, Uziel and El-Yaniv (2019), Bias-reduced uncertainty estimation for deep neural
        classifiers.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.2500)
    """
    wrong, given, counts = _checked(probs, targets, confidence, weights)
    each = torch.ones_like(given) if counts is None else counts
    # Of a group of equal confidences, from `a` points before it with E errors to `b`, and a share e
    # of errors among them, the sum of `(E + (k - a) e) / k` over k is in closed form.
    values, group = (-given).unique(return_inverse=True)
    zeros = torch.zeros(len(values), dtype=torch.float64, device=given.device)
    mass = zeros.index_add(0, group, each.double())
    errors = zeros.index_add(0, group, each.double() * wrong)
    kept = mass > 0
    mass, errors = mass[kept], errors[kept]
    after = mass.cumsum(0)
    before, share = after - mass, errors / mass
    past = errors.cumsum(0) - errors - before * share
    harmonic = torch.digamma(after + 1) - torch.digamma(before + 1)
    area = (errors + past * harmonic).sum() / after[-1]
    return area.to(torch.promote_types(probs.dtype, torch.float32))
