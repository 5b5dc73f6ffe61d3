"""Calibration after training: one number that mends probabilities or scales, sets that cover."""

from tyxe.calibration.base import Calibrated, CalibratedEnsemble, Calibrator
from tyxe.calibration.conformal import SplitConformal, coverage, size
from tyxe.calibration.scaling import ScaleFactor, TemperatureScaling

__all__ = [
    "Calibrated",
    "CalibratedEnsemble",
    "Calibrator",
    "ScaleFactor",
    "SplitConformal",
    "TemperatureScaling",
    "coverage",
    "size",
]
