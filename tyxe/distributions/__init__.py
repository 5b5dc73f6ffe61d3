"""What the rest of the package needs to know of distributions, open by registration."""

from tyxe.distributions.moments import (
    center,
    deviation,
    elementwise,
    independent_moments,
    is_discrete,
    is_factorized,
    is_real,
    known_entropy,
    same_support,
)
from tyxe.distributions.normal import FactorizedNormal
from tyxe.distributions.normal_kl import factorized_normal_kl, joins, joint_kl, log_density
from tyxe.distributions.packed import PackedSamples, PackedSigns
from tyxe.distributions.shifted import Shifted
from tyxe.distributions.signed_bernoulli import (
    RelaxedSignedBernoulli,
    SignedBernoulli,
    SignedBetaBernoulli,
    Signs,
)
from tyxe.distributions.stored import StoredDistribution, detached

__all__ = [
    "FactorizedNormal",
    "PackedSamples",
    "PackedSigns",
    "RelaxedSignedBernoulli",
    "Shifted",
    "SignedBernoulli",
    "SignedBetaBernoulli",
    "Signs",
    "StoredDistribution",
    "center",
    "detached",
    "deviation",
    "elementwise",
    "factorized_normal_kl",
    "independent_moments",
    "is_discrete",
    "is_factorized",
    "is_real",
    "joins",
    "joint_kl",
    "known_entropy",
    "log_density",
    "same_support",
]
