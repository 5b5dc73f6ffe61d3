"""Effect handlers: how linear maps are sampled, which data points count, how sites were used.

Each is a Pyro messenger: a context manager and a decorator.
"""

from tyxe.poutine.draw import Draw
from tyxe.poutine.flipout import flipout
from tyxe.poutine.linear_map import LinearMap, LinearMapMessenger
from tyxe.poutine.local_reparameterization import (
    local_reparameterization,
    local_reparameterization_moments,
)
from tyxe.poutine.report import Report, report
from tyxe.poutine.selective import selective_mask, selective_scale
from tyxe.poutine.variational_laplace import variational_laplace

__all__ = [
    "Draw",
    "LinearMap",
    "LinearMapMessenger",
    "Report",
    "flipout",
    "local_reparameterization",
    "local_reparameterization_moments",
    "report",
    "selective_mask",
    "selective_scale",
    "variational_laplace",
]
