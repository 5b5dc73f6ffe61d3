"""Figures: bands, calibration, predictive entropy, scores, training curves, accuracy over tasks.

They need the optional extra `plot` (matplotlib), and raise `ImportError` without it. Every function
draws on `ax`, or if it is None on the axes of a new figure, and returns the axes. None of them
shows or saves the figure. Inputs are checked as in `tyxe.metrics`, with its errors.
"""

from tyxe.plotting.predictions import (
    calibration_curve,
    entropy_ecdf,
    ood_histogram,
    pit_histogram,
    predictive_band,
    qq,
    risk_coverage,
)
from tyxe.plotting.training import accuracy_over_tasks, history

__all__ = [
    "accuracy_over_tasks",
    "calibration_curve",
    "entropy_ecdf",
    "history",
    "ood_histogram",
    "pit_histogram",
    "predictive_band",
    "qq",
    "risk_coverage",
]
