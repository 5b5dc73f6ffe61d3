"""Continual learning: tasks one after the other, the posterior of one the prior of the next."""

from tyxe.continual.coresets import (
    CORESETS,
    coreset_indices,
    k_center,
    random_points,
    restored,
    split_coreset,
)
from tyxe.continual.heads import Heads
from tyxe.continual.intelligence import SynapticIntelligence, path_importance
from tyxe.continual.loop import TaskLoop, posterior_to_prior
from tyxe.continual.metrics import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from tyxe.continual.penalties import GaussianPenalty

__all__ = [
    "CORESETS",
    "GaussianPenalty",
    "Heads",
    "SynapticIntelligence",
    "TaskLoop",
    "average_accuracy",
    "backward_transfer",
    "coreset_indices",
    "forgetting",
    "forward_transfer",
    "k_center",
    "path_importance",
    "posterior_to_prior",
    "random_points",
    "restored",
    "split_coreset",
]
