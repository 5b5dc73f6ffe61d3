"""Curvature of any net under any likelihood, in several structures."""

from tyxe.curvature.collect import Curvature, collect_curvature
from tyxe.curvature.linearize import Linearization
from tyxe.curvature.output_covariance import functional_covariance, jacobian
from tyxe.curvature.products import CurvatureProducts

__all__ = [
    "Curvature",
    "CurvatureProducts",
    "Linearization",
    "collect_curvature",
    "functional_covariance",
    "jacobian",
]
