"""Scores of predictions: classification, out-of-distribution detection and regression.

Classification metrics take class probabilities of shape `(n, C)` and integer targets of shape
`(n,)`. Regression metrics take a Gaussian's `mean` and `scale` and the `targets`, all of one shape
`(n, ...)`, and average over every entry. Results are 0-d tensors on the inputs' device unless a
function says otherwise; float16 and bfloat16 are computed, and returned, in float32.

Every function checks its inputs. It raises `TypeError` for inputs that are no floating-point
tensors (for classes: no integer tensors), and `ValueError` for NaNs, empty inputs, shapes or
devices that do not match, rows of probabilities that are negative or do not sum to one, classes out
of range, and scores that are no vectors.
"""

from tyxe.metrics.classification import (
    accuracy,
    brier_score,
    calibration_curve,
    expected_calibration_error,
    nll,
    predictive_entropy,
)
from tyxe.metrics.detection import ood_aupr, ood_auroc
from tyxe.metrics.regression import crps_gaussian, gaussian_nll, interval_coverage, rmse

__all__ = [
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
