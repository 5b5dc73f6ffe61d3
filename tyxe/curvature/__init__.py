"""Curvature of any net under any likelihood, by structure."""

from tyxe.curvature.accumulate import ACCUMULATORS, check_size
from tyxe.curvature.collect import CURVATURES, Curvature, check_groups, collect_curvature
from tyxe.curvature.covariance import covariance_through, functional_covariance, jacobian
from tyxe.curvature.groups import Group, LinearGroup, PlainGroup, joined, separated
from tyxe.curvature.guide import LaplaceGuide
from tyxe.curvature.linearize import Linearization, linearized

__all__ = [
    "ACCUMULATORS",
    "CURVATURES",
    "Curvature",
    "Group",
    "LaplaceGuide",
    "LinearGroup",
    "Linearization",
    "PlainGroup",
    "check_groups",
    "check_size",
    "collect_curvature",
    "covariance_through",
    "functional_covariance",
    "jacobian",
    "joined",
    "linearized",
    "separated",
]
