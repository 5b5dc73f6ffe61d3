"""Laplace approximations: a mode, a curvature and a prior in one immutable state."""

from tyxe.laplace.guide import LaplaceGuide
from tyxe.laplace.precision import LaplaceOptions
from tyxe.laplace.state import LaplaceState

__all__ = [
    "LaplaceGuide",
    "LaplaceOptions",
    "LaplaceState",
]
