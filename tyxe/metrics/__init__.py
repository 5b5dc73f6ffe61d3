"""Scores of predictions: classification, out-of-distribution detection and regression.

Arguments that most functions share are described here, once:

- `probs`: class probabilities, `(n, C)`, and `targets`: classes in `0..C-1`, `(n,)`.
- `mean` and `scale`: means and standard deviations of Gaussians, `(n, ...)`, and `targets` of that
  shape; a scale may be one number.
- `in_scores` and `out_scores`: scores of points in and out of distribution, `(n,)` and `(m,)`,
  higher for "more in".
- `weights`: how often each point counts, `(n,)`, by default once; a mask leaves some out.

Results are averages over points and entries, 0-d tensors on the inputs' device, unless a function
says otherwise. float16 and bfloat16 are computed, and returned, in float32.

Every function raises `TypeError` for inputs that are not floating-point tensors (for classes: not
integer tensors), and `ValueError` for NaNs, empty inputs, shapes that do not match, rows of
probabilities that are negative or do not sum to one, classes, levels and numbers out of range.
"""

from tyxe.metrics.classification import (
    accuracy,
    adaptive_calibration_error,
    aurc,
    brier_score,
    calibration_curve,
    expected_calibration_error,
    fpr_at_tpr,
    nll,
    ood_aupr,
    ood_auroc,
    predictive_entropy,
    risk_coverage_curve,
)
from tyxe.metrics.regression import (
    crps_gaussian,
    crps_mixture,
    crps_samples,
    gaussian_nll,
    gaussian_pit,
    interval_coverage,
    interval_score,
    lppd,
    quantile_calibration_error,
    rmse,
    sample_pit,
)

__all__ = [
    "accuracy",
    "adaptive_calibration_error",
    "aurc",
    "brier_score",
    "calibration_curve",
    "crps_gaussian",
    "crps_mixture",
    "crps_samples",
    "expected_calibration_error",
    "fpr_at_tpr",
    "gaussian_nll",
    "gaussian_pit",
    "interval_coverage",
    "interval_score",
    "lppd",
    "nll",
    "ood_aupr",
    "ood_auroc",
    "predictive_entropy",
    "quantile_calibration_error",
    "risk_coverage_curve",
    "rmse",
    "sample_pit",
]
