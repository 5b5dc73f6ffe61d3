"""Which parameters of a net are random, and with which distribution."""

from tyxe.priors.base import Prior
from tyxe.priors.binary import BinaryPrior
from tyxe.priors.iid import IIDPrior
from tyxe.priors.layerwise import LayerwiseNormalPrior
from tyxe.priors.mapping import DictPrior, LambdaPrior

__all__ = [
    "BinaryPrior",
    "DictPrior",
    "IIDPrior",
    "LambdaPrior",
    "LayerwiseNormalPrior",
    "Prior",
]
