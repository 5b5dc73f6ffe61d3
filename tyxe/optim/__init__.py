"""Optimisers, and how a fit makes one torch optimiser of what it is given."""

from tyxe.optim.groups import make_optimizer

__all__ = ["make_optimizer"]
