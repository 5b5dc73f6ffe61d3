"""What the rest of the package needs to know of distributions, open by registration."""

from tyxe.distributions.groups import (
    Group,
    LinearGroup,
    PlainGroup,
    group_from_state,
    group_state,
    joined,
    separated,
)
from tyxe.distributions.inducing import InducingWeights
from tyxe.distributions.inducing_hierarchy import HierarchicalInducing
from tyxe.distributions.joint import JointDistribution, JointMarginal, SiteProduct
from tyxe.distributions.joint_normal import GaussianJoint, JointNormal
from tyxe.distributions.joint_normal_kl import normal_moments
from tyxe.distributions.joint_outline import joint_from_outline, joint_outline
from tyxe.distributions.joint_part import JointPart
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
from tyxe.distributions.normal_product import NormalProduct, product_of
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
    "GaussianJoint",
    "Group",
    "HierarchicalInducing",
    "InducingWeights",
    "JointDistribution",
    "JointMarginal",
    "JointNormal",
    "JointPart",
    "LinearGroup",
    "NormalProduct",
    "PackedSamples",
    "PackedSigns",
    "PlainGroup",
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
    "group_from_state",
    "group_state",
    "independent_moments",
    "is_discrete",
    "is_factorized",
    "is_real",
    "joined",
    "joins",
    "joint_from_outline",
    "joint_kl",
    "joint_outline",
    "known_entropy",
    "log_density",
    "normal_moments",
    "product_of",
    "same_support",
    "separated",
]
