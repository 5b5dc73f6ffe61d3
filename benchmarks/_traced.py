"""A BNN's loss and gradients as one graph, which can be compiled or captured.

`elbo_terms` is Python around tensor operations; for one shape of batch the operations are always
the same. `make_fx` runs the Python once and keeps what was done to tensors, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pyro
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import tyxe
from tyxe.bnn import elbo_terms

Handler = Callable[[], AbstractContextManager]
Graph = Callable[[list[Tensor], list[Tensor], Tensor, Tensor], list[Tensor]]


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


class Traced:
    """The objective's loss and gradients as a graph of parameters, buffers and a batch."""

    def __init__(self, objective: Objective, x: Tensor, y: Tensor) -> None:
        named = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        # Statistics of norms change; the prior's numbers do not.
        buffers = {f"bnn.net.{name}": b for name, b in objective.bnn.net.named_buffers()}
        self.parameters, self.buffers = list(named.values()), list(buffers.values())

        def loss_and_gradients(
            values: list[Tensor], states: list[Tensor], x: Tensor, y: Tensor
        ) -> list[Tensor]:
            values = [value.detach().requires_grad_() for value in values]
            swapped = dict(zip([*named, *buffers], [*values, *states], strict=True))
            loss = functional_call(objective, swapped, (x, y))
            return [loss.detach(), *torch.autograd.grad(loss, values)]

        values = [p.detach() for p in self.parameters]
        # What runs here must not count as a step for the norms' statistics.
        states = [b.clone() for b in self.buffers]
        # The first run reads the prior's numbers, which cannot be read off a graph.
        loss_and_gradients(values, states, x, y)
        self.graph = make_fx(loss_and_gradients)(values, states, x, y)

    def step(self, graph: Graph, x: Tensor, y: Tensor) -> Callable[[], None]:
        """Return a step with Adam, fused as in `fit`, whose gradients come from a graph."""
        optimizer = torch.optim.Adam(self.parameters, lr=1e-3, fused=True)
        values = [p.detach() for p in self.parameters]

        def step() -> None:
            _, *gradients = graph(values, self.buffers, x, y)
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        return step
