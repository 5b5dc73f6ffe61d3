"""Bayesian neural networks from any PyTorch module, on Pyro."""

from importlib.metadata import PackageNotFoundError, version

from tyxe import (
    bnn,
    distributions,
    guides,
    likelihoods,
    metrics,
    plotting,
    poutine,
    priors,
    util,
)
from tyxe.bnn import BNN, MCMC_BNN, PytorchBNN, VariationalBNN
from tyxe.errors import TyxeWarning

try:
    __version__ = version("tyxe-bnn")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BNN",
    "MCMC_BNN",
    "PytorchBNN",
    "TyxeWarning",
    "VariationalBNN",
    "bnn",
    "distributions",
    "guides",
    "likelihoods",
    "metrics",
    "plotting",
    "poutine",
    "priors",
    "util",
]
