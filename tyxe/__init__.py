"""Bayesian neural networks from any PyTorch module, on Pyro."""

from importlib.metadata import PackageNotFoundError, version

from tyxe import (
    bnn,
    calibration,
    continual,
    curvature,
    data,
    diagnostics,
    distributions,
    guides,
    laplace,
    likelihoods,
    linalg,
    metrics,
    optim,
    plotting,
    poutine,
    predictive,
    priors,
    samplers,
    util,
)
from tyxe.bnn import (
    BNN,
    MCMC_BNN,
    SWAG_BNN,
    Callback,
    DropoutBNN,
    EnsembleBNN,
    LaplaceBNN,
    PytorchBNN,
    Trainable,
    VariationalBNN,
    estimate_evidence,
)
from tyxe.errors import TyxeWarning
from tyxe.laplace import LaplaceOptions

try:
    __version__ = version("tyxe-bnn")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BNN",
    "MCMC_BNN",
    "SWAG_BNN",
    "Callback",
    "DropoutBNN",
    "EnsembleBNN",
    "LaplaceBNN",
    "LaplaceOptions",
    "PytorchBNN",
    "Trainable",
    "TyxeWarning",
    "VariationalBNN",
    "bnn",
    "calibration",
    "continual",
    "curvature",
    "data",
    "diagnostics",
    "distributions",
    "estimate_evidence",
    "guides",
    "laplace",
    "likelihoods",
    "linalg",
    "metrics",
    "optim",
    "plotting",
    "poutine",
    "predictive",
    "priors",
    "samplers",
    "util",
]
