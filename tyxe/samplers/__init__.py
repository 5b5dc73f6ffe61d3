"""Samplers of densities over vectors, all chains at once: plain tensors in and out."""

from tyxe.samplers.hmc import HMC
from tyxe.samplers.kernel import Chains, Kernel, Randomness, Transition
from tyxe.samplers.mclmc import MCLMC
from tyxe.samplers.nuts import NUTS
from tyxe.samplers.potential import batched
from tyxe.samplers.run import Run
from tyxe.samplers.warm_start import WarmStart, warm_start

__all__ = [
    "HMC",
    "MCLMC",
    "NUTS",
    "Chains",
    "Kernel",
    "Randomness",
    "Run",
    "Transition",
    "WarmStart",
    "batched",
    "warm_start",
]
