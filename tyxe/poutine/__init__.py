"""Effect handlers: how linear maps are sampled, which data counts, what happened.

Each is a Pyro messenger: a context manager and a decorator.
"""

from tyxe.poutine.draw import Draw, draws_are_lazy, place
from tyxe.poutine.linear_map import LinearMap, LinearMapMessenger
from tyxe.poutine.reparameterization import (
    FlipoutMessenger,
    LocalReparameterizationMessenger,
    flipout,
    local_reparameterization,
    local_reparameterization_moments,
)
from tyxe.poutine.report import Report, report
from tyxe.poutine.selective import masked_pointwise, selective_mask, selective_scale
from tyxe.poutine.variational_laplace import (
    VariationalLaplaceMessenger,
    announce_objective,
    variational_laplace,
)

__all__ = [
    "Draw",
    "FlipoutMessenger",
    "LinearMap",
    "LinearMapMessenger",
    "LocalReparameterizationMessenger",
    "Report",
    "VariationalLaplaceMessenger",
    "announce_objective",
    "draws_are_lazy",
    "flipout",
    "local_reparameterization",
    "local_reparameterization_moments",
    "masked_pointwise",
    "place",
    "report",
    "selective_mask",
    "selective_scale",
    "variational_laplace",
]
