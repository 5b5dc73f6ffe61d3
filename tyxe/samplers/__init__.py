"""Samplers of densities over vectors, all chains at once: plain tensors in and out."""

from tyxe.samplers.hamiltonian import HMC
from tyxe.samplers.kernel import Chains, Kernel, Length, Randomness, Transition
from tyxe.samplers.mclmc import MCLMC
from tyxe.samplers.nuts import NUTS
from tyxe.samplers.potential import batched
from tyxe.samplers.run import Run
from tyxe.samplers.stochastic_gradient import SGHMC, SGLD
from tyxe.samplers.warm_start import WarmStart, warm_start

__all__ = [
    "HMC",
    "MCLMC",
    "NUTS",
    "SGHMC",
    "SGLD",
    "Chains",
    "Kernel",
    "Length",
    "Randomness",
    "Run",
    "Transition",
    "WarmStart",
    "batched",
    "warm_start",
]
