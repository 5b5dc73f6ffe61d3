"""Continual learning: tasks in sequence, where the posterior of one is the prior of the next."""

from tyxe.continual.heads import Heads
from tyxe.continual.loop import (
    TaskLoop,
    average_accuracy,
    forgetting,
    forward_transfer,
    posterior_to_prior,
)
from tyxe.continual.memory import SynapticIntelligence, coreset_indices

__all__ = [
    "Heads",
    "SynapticIntelligence",
    "TaskLoop",
    "average_accuracy",
    "coreset_indices",
    "forgetting",
    "forward_transfer",
    "posterior_to_prior",
]
