"""The wrappers: a net, a prior, a likelihood, and a guide or kernel."""

from tyxe.bnn.averages import SWAG_BNN, DropoutBNN
from tyxe.bnn.base import BNN
from tyxe.bnn.checkpoint import History
from tyxe.bnn.elbo import ElboTerms, elbo_terms
from tyxe.bnn.ensemble import EnsembleBNN
from tyxe.bnn.laplace import LaplaceBNN, estimate_evidence
from tyxe.bnn.mcmc import MCMC_BNN
from tyxe.bnn.pytorch import PytorchBNN
from tyxe.bnn.trained import Trainable
from tyxe.bnn.training import Callback
from tyxe.bnn.variational import VariationalBNN

__all__ = [
    "BNN",
    "MCMC_BNN",
    "SWAG_BNN",
    "Callback",
    "DropoutBNN",
    "ElboTerms",
    "EnsembleBNN",
    "History",
    "LaplaceBNN",
    "PytorchBNN",
    "Trainable",
    "VariationalBNN",
    "elbo_terms",
    "estimate_evidence",
]
