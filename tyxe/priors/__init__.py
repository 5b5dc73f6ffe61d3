"""Which parameters of a net are random, and with which distribution."""

from tyxe.priors.base import Prior
from tyxe.priors.mapping import (
    BinaryPrior,
    DictPrior,
    IIDPrior,
    LambdaPrior,
    LayerwiseNormalPrior,
    SubnetworkPrior,
    subnetwork,
)

__all__ = [
    "BinaryPrior",
    "DictPrior",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
    "SubnetworkPrior",
    "subnetwork",
]
