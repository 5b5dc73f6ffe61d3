"""Checks of posteriors: calibration by simulation, agreement with references, all scores."""

from tyxe.diagnostics.convergence import pareto_k
from tyxe.diagnostics.diagnose import diagnose
from tyxe.diagnostics.report import Line, Report
from tyxe.diagnostics.sbc import SBC, sbc
from tyxe.diagnostics.scores import (
    Reference,
    Scores,
    agreement,
    reference,
    scores,
    total_variation,
    wasserstein2,
)

__all__ = [
    "SBC",
    "Line",
    "Reference",
    "Report",
    "Scores",
    "agreement",
    "diagnose",
    "pareto_k",
    "reference",
    "sbc",
    "scores",
    "total_variation",
    "wasserstein2",
]
