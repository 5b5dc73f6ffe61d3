"""Curvature of any net under any likelihood, by structure."""

from tyxe.curvature.accumulate import ACCUMULATORS
from tyxe.curvature.collect import CURVATURES, Curvature, check_groups, collect_curvature
from tyxe.curvature.covariance import (
    covariance_through,
    functional_covariance,
    jacobian,
    joint_covariance,
)
from tyxe.curvature.guide import LaplaceGuide, check_structure
from tyxe.curvature.linearize import Linearization, check_is_tensor, linearized
from tyxe.curvature.memory import check_memory, check_size
from tyxe.curvature.per_point import is_constant
from tyxe.distributions import Group, LinearGroup, PlainGroup, joined, separated

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
    "check_is_tensor",
    "check_memory",
    "check_size",
    "check_structure",
    "collect_curvature",
    "covariance_through",
    "functional_covariance",
    "is_constant",
    "jacobian",
    "joined",
    "joint_covariance",
    "linearized",
    "separated",
]
