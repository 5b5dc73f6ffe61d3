"""Distributions over sites, and their moments by registration."""

from tyxe.distributions.gaussian import Gaussian
from tyxe.distributions.inducing import InducingWeights
from tyxe.distributions.joint import IndependentSites, JointDistribution, JointMarginal
from tyxe.distributions.normal import (
    FactorizedNormal,
    PrunedNormal,
    as_gaussian,
    center,
    deviation,
    independent_moments,
    known_entropy,
)
from tyxe.distributions.param_blocks import ParamBlocks
from tyxe.distributions.signed_bernoulli import SignedBernoulli, SignedBetaBernoulli

__all__ = [
    "FactorizedNormal",
    "Gaussian",
    "IndependentSites",
    "InducingWeights",
    "JointDistribution",
    "JointMarginal",
    "ParamBlocks",
    "PrunedNormal",
    "SignedBernoulli",
    "SignedBetaBernoulli",
    "as_gaussian",
    "center",
    "deviation",
    "independent_moments",
    "known_entropy",
]
