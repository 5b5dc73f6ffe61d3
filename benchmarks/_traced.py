"""A BNN's loss as a module, which can be captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pyro
from torch import Tensor, nn

import tyxe
from tyxe.bnn import elbo_terms

Handler = Callable[[], AbstractContextManager]


class Objective(nn.Module):
    """The loss that `bnn.fit` follows: `(KL - E_q log p) / N`."""

    def __init__(self, bnn: tyxe.VariationalBNN, handler: Handler) -> None:
        super().__init__()
        self.bnn, self.handler = bnn, handler

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss for one draw."""
        with self.handler(), pyro.validation_enabled(False):
            terms = elbo_terms(self.bnn.model, self.bnn.guide, x, y)
        return (terms.kl - terms.data) / self.bnn.likelihood.dataset_size
