"""Scores of detectors of out-of-distribution points."""

import math

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import check_scores


def ood_auroc(in_scores: Tensor, out_scores: Tensor) -> Tensor:
    r"""Area under the ROC curve when in-distribution is the positive class.

    `P(s_in > s_out) + P(s_in = s_out) / 2`. Higher scores mean "more in-distribution": pass
    `probs.amax(-1)` or `-predictive_entropy(probs)`. Chance is 0.5. Time is that of sorting, memory
    linear.

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
    r"""Fraction of out-of-distribution points kept where a share of in-distribution ones is.

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
