"""Scores of how points are ranked: detectors of unfamiliar ones, classifiers that may abstain."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import check_classified, check_real, check_scores, check_weights


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
