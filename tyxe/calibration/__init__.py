"""Calibration after training: probabilities, scales, sets with guaranteed coverage, abstaining."""

from tyxe.calibration.base import Calibrated, CalibratedModule, Calibrator
from tyxe.calibration.conformal import CVPlus, SplitConformal, coverage, size
from tyxe.calibration.risk import RiskControl
from tyxe.calibration.scaling import ScaleFactor, TemperatureScaling

__all__ = [
    "CVPlus",
    "Calibrated",
    "CalibratedModule",
    "Calibrator",
    "RiskControl",
    "ScaleFactor",
    "SplitConformal",
    "TemperatureScaling",
    "coverage",
    "size",
]
