"""Laplace approximations: a mode, a curvature and a prior in one immutable state."""

from tyxe.laplace.precision import LaplaceOptions
from tyxe.laplace.state import LaplaceGuide, LaplaceState

__all__ = [
    "LaplaceGuide",
    "LaplaceOptions",
    "LaplaceState",
]
