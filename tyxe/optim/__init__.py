"""Optimisers, and how a fit makes one torch optimiser of what it is given."""

from tyxe.optim.groups import ParticleOptimizer, make_optimizer
from tyxe.optim.ivon import IVON

__all__ = ["IVON", "ParticleOptimizer", "make_optimizer"]
