"""What the rest of the package needs to know of distributions, open by registration."""

from tyxe.distributions.moments import (
    center,
    deviation,
    independent_moments,
    is_factorized,
    is_real,
    known_entropy,
)
from tyxe.distributions.normal import FactorizedNormal
from tyxe.distributions.normal_kl import factorized_normal_kl, joins, joint_kl
from tyxe.distributions.shifted import Shifted
from tyxe.distributions.stored import StoredDistribution, detached

__all__ = [
    "FactorizedNormal",
    "Shifted",
    "StoredDistribution",
    "center",
    "detached",
    "deviation",
    "factorized_normal_kl",
    "independent_moments",
    "is_factorized",
    "is_real",
    "joins",
    "joint_kl",
    "known_entropy",
]
