"""Which parameters of a net are random, and with which distribution."""

from tyxe.priors.base import Prior
from tyxe.priors.elementwise import BinaryPrior, IIDPrior, LayerwiseNormalPrior
from tyxe.priors.mapping import DictPrior, LambdaPrior
from tyxe.priors.single_weights import SubnetworkPrior, subnetwork

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
