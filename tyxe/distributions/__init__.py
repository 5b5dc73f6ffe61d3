"""Distributions over sites, and their moments by registration."""

import tyxe.distributions.joint_normal_kl  # noqa: F401  (registers its KLs)
from tyxe.distributions.inducing import InducingWeights
from tyxe.distributions.joint import IndependentSites, JointDistribution, JointMarginal
from tyxe.distributions.joint_normal import JointNormal
from tyxe.distributions.moments import center, deviation, independent_moments, known_entropy
from tyxe.distributions.normal import FactorizedNormal
from tyxe.distributions.param_blocks import ParamBlocks
from tyxe.distributions.pruned import PrunedNormal
from tyxe.distributions.signed_bernoulli import SignedBernoulli, SignedBetaBernoulli

__all__ = [
    "FactorizedNormal",
    "IndependentSites",
    "InducingWeights",
    "JointDistribution",
    "JointMarginal",
    "JointNormal",
    "ParamBlocks",
    "PrunedNormal",
    "SignedBernoulli",
    "SignedBetaBernoulli",
    "center",
    "deviation",
    "independent_moments",
    "known_entropy",
]
