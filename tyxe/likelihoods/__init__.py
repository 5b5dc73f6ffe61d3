"""How predictions and targets meet: the observed site, its errors, samples and aggregates."""

from tyxe.likelihoods.base import Likelihood
from tyxe.likelihoods.discrete import Bernoulli, Categorical
from tyxe.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian
from tyxe.likelihoods.output_hessian import (
    SqrtColumns,
    output_hessian,
    output_hessian_sqrt,
    sampled_gradient,
    true_gradient,
)
from tyxe.likelihoods.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "HeteroskedasticGaussian",
    "HomoskedasticGaussian",
    "Likelihood",
    "Poisson",
    "SqrtColumns",
    "output_hessian",
    "output_hessian_sqrt",
    "sampled_gradient",
    "true_gradient",
]
