"""From a Gaussian posterior to predictions: links, and the parts of their uncertainty."""

from tyxe.predictive.decomposition import (
    EntropyDecomposition,
    VarianceDecomposition,
    entropy_decomposition,
    regression_decomposition,
    variance_decomposition,
)
from tyxe.predictive.features import Features, output_features
from tyxe.predictive.gaussian import check_link, predict_from_gaussian
from tyxe.predictive.gp import GPPredictive, hessian_root
from tyxe.predictive.linear_model import LinearModel
from tyxe.predictive.links import (
    BINARY_LINKS,
    CLASS_LINKS,
    Link,
    bridge,
    bridge_log_concentration,
    mc,
    mc_binary,
    probit,
    probit_binary,
    sample_outputs,
)
from tyxe.predictive.refine import refine_laplace, refine_variational

__all__ = [
    "BINARY_LINKS",
    "CLASS_LINKS",
    "EntropyDecomposition",
    "Features",
    "GPPredictive",
    "LinearModel",
    "Link",
    "VarianceDecomposition",
    "bridge",
    "bridge_log_concentration",
    "check_link",
    "entropy_decomposition",
    "hessian_root",
    "mc",
    "mc_binary",
    "output_features",
    "predict_from_gaussian",
    "probit",
    "probit_binary",
    "refine_laplace",
    "refine_variational",
    "regression_decomposition",
    "sample_outputs",
    "variance_decomposition",
]
