"""From a Gaussian posterior to predictions: links, and the parts of their uncertainty."""

from tyxe.predictive.decomposition import (
    EntropyDecomposition,
    VarianceDecomposition,
    entropy_decomposition,
    regression_decomposition,
    variance_decomposition,
)
from tyxe.predictive.distributions import PredictiveMixture, quantile
from tyxe.predictive.ensemble import ClosedForm, Ensemble
from tyxe.predictive.gaussian import predict_from_gaussian
from tyxe.predictive.linear_model import LinearModel, refine_laplace
from tyxe.predictive.natural_gradient import refine_variational

__all__ = [
    "ClosedForm",
    "Ensemble",
    "EntropyDecomposition",
    "LinearModel",
    "PredictiveMixture",
    "VarianceDecomposition",
    "entropy_decomposition",
    "predict_from_gaussian",
    "quantile",
    "refine_laplace",
    "refine_variational",
    "regression_decomposition",
    "variance_decomposition",
]
