"""What the rest of the package needs to know of distributions, open by registration."""

from tyxe.distributions.inducing import InducingWeights
from tyxe.distributions.inducing_hierarchy import HierarchicalInducing
from tyxe.distributions.joint import JointDistribution, JointMarginal, SiteProduct
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
from tyxe.distributions.pruned import PrunedNormal
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
    "HierarchicalInducing",
    "InducingWeights",
    "JointDistribution",
    "JointMarginal",
    "PackedSamples",
    "PackedSigns",
    "PrunedNormal",
    "RelaxedSignedBernoulli",
    "Shifted",
    "SignedBernoulli",
    "SignedBetaBernoulli",
    "Signs",
    "SiteProduct",
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
