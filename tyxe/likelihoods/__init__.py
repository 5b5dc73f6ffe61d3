"""Likelihoods: the observed site, its errors, samples, aggregates and curvature."""

from tyxe.likelihoods.base import Likelihood
from tyxe.likelihoods.discrete import Bernoulli, Categorical, Poisson
from tyxe.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian
from tyxe.likelihoods.joint import Joint
from tyxe.likelihoods.output_hessian import output_hessian, output_hessian_sqrt

__all__ = [
    "Bernoulli",
    "Categorical",
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "Joint",
    "Likelihood",
    "Poisson",
    "output_hessian",
    "output_hessian_sqrt",
]
