"""Steps of a fit as compiled programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tyxe.bnn.elbo import ElboTerms
from tyxe.bnn.parallel import Objective
from tyxe.bnn.programs import Programs, are_tensors, as_program, check_buffers, key_of
from tyxe.util import Inputs


class CompiledSteps:
    """Terms and gradients of an objective as compiled programs.

    What runs in Python (programs of model and guide, handlers) runs once, and what it did to
    tensors, backward included, is the program; for a seed it draws the numbers that it drew
    uncompiled.

    Args:
        objective: the loss of a batch.
        parameters: of the BNN, by name, whose gradients are taken.
    """

    def __init__(self, objective: Objective, parameters: Mapping[str, Tensor]) -> None:
        self._objective, self._parameters = objective, dict(parameters)
        norms = objective.bnn.net.named_buffers()
        self._buffers = {f"bnn.net.{name}": buffer for name, buffer in norms}
        self._programs = Programs("steps", next(iter(self._parameters.values())).device)

    @property
    def seconds(self) -> float:
        """Seconds that compilation has taken."""
        return self._programs.seconds

    def __call__(self, inputs: Inputs, targets: Any, beta: float, share: float) -> ElboTerms | None:
        """Add a share of the gradients of a batch and return its terms, or None without a program.

        A program is compiled where the batch is of a new kind.
        """
        leaves = tree_leaves((inputs, targets))
        if not are_tensors(leaves):
            return None
        # Handlers may have the KL's weight from elsewhere.
        key = (key_of((inputs, targets)), beta if am_i_wrapped() else None)
        made = self._programs.find(key, lambda: self._compiled(inputs, targets, beta))
        if made is None:
            return None
        run, used, points = made
        values = [parameter.detach() for parameter in self._parameters.values()]
        weight = torch.tensor(beta, device=values[0].device)
        found = run(*values, *self._buffers.values(), *leaves, weight)
        data, kl, *gradients = found[: len(used) + 2]
        for parameter, gradient in zip(used, gradients, strict=True):
            gradient = gradient if share == 1 else gradient * share
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return ElboTerms(data, kl, found[-1] if points is None else points, {})

    def _compiled(self, inputs: Inputs, targets: Any, beta: float) -> tuple[Any, Any, Any]:
        leaves, place = tree_flatten((inputs, targets))
        count, names = len(self._parameters), [f"bnn.{name}" for name in self._parameters]
        known: list[Any] = []

        def step(*given: Tensor) -> list[Tensor]:
            values = [value.detach().requires_grad_() for value in given[:count]]
            others = given[count : count + len(self._buffers)]
            swapped = dict(zip([*names, *self._buffers], [*values, *others], strict=True))
            batch = tree_unflatten(given[count + len(others) : -1], place)
            buffers = swapped.values()
            watch = self._objective.register_forward_hook(
                lambda objective, *_: check_buffers(objective.bnn.net, buffers)
            )
            try:
                loss = torch.func.functional_call(self._objective, swapped, (*batch, given[-1]))
            finally:
                watch.remove()
            terms = self._objective.take_terms()
            gradients = torch.autograd.grad(loss, values, allow_unused=True)
            points = [terms.points] if isinstance(terms.points, Tensor) else []
            known[:] = [terms.points if not points else None, [g is not None for g in gradients]]
            used = [gradient for gradient in gradients if gradient is not None]
            return [terms.data.detach(), terms.kl.detach(), *used, *points]

        values = [parameter.detach() for parameter in self._parameters.values()]
        given = [*values, *self._buffers.values(), *leaves]
        run = as_program(step, [*given, torch.tensor(beta, device=values[0].device)])
        points, is_used = known
        trained = zip(self._parameters.values(), is_used, strict=True)
        return run, [parameter for parameter, used in trained if used], points
