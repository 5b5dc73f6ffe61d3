"""Is the posterior right: simulation-based calibration, and agreement with a reference."""

from tyxe.diagnostics.agreement import agreement, total_variation, wasserstein2
from tyxe.diagnostics.psis import pareto_k
from tyxe.diagnostics.sbc import SBC, sbc

__all__ = ["SBC", "agreement", "pareto_k", "sbc", "total_variation", "wasserstein2"]
