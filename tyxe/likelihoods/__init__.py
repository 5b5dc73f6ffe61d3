"""Likelihoods: the observed site, its errors, samples, aggregates and curvature."""

from tyxe.likelihoods.base import Likelihood
from tyxe.likelihoods.censored import Censored, censored_targets, log_tails
from tyxe.likelihoods.counts import NegativeBinomial, Ordinal, Poisson
from tyxe.likelihoods.discrete import Bernoulli, Categorical
from tyxe.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian, StudentT
from tyxe.likelihoods.joint import Joint
from tyxe.likelihoods.output_hessian import output_hessian, output_hessian_sqrt

__all__ = [
    "Bernoulli",
    "Categorical",
    "Censored",
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "Joint",
    "Likelihood",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "StudentT",
    "censored_targets",
    "log_tails",
    "output_hessian",
    "output_hessian_sqrt",
]
