"""Steps of a fit, and batches of a curvature, as compiled programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tyxe.bnn.elbo import ElboTerms
from tyxe.bnn.parallel import Objective
from tyxe.bnn.programs import (
    MOST_PROGRAMS,
    Programs,
    are_tensors,
    as_program,
    check_buffers,
    dense,
    key_of,
)
from tyxe.curvature.collect import CurvatureSums
from tyxe.data import Targets
from tyxe.errors import warn
from tyxe.util import Inputs

# Backward passes of a batch that a program may have; a compiler takes longer for more.
MOST_PASSES = 32


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
        found = run(*values, *self._buffers.values(), *dense(leaves), weight)
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
        given = [*values, *self._buffers.values(), *dense(leaves)]
        run = as_program(step, [*given, torch.tensor(beta, device=values[0].device)])
        points, is_used = known
        trained = zip(self._parameters.values(), is_used, strict=True)
        return run, [parameter for parameter, used in trained if used], points


class _Addition(nn.Module):
    """The addition of a batch to sums, as a module whose parameters and buffers can be swapped."""

    def __init__(self, bnn: Any, sums: CurvatureSums) -> None:
        super().__init__()
        self.bnn, self.sums = bnn, sums

    def forward(self, totals: list[Tensor], inputs: Inputs, targets: Targets) -> Tensor:
        held = [*self.bnn.net.buffers()]
        outputs = self.sums.add_to(totals, inputs, targets)
        check_buffers(self.bnn.net, held)
        return outputs


class CompiledCurvature:
    """Batches of a curvature as compiled programs, in the place of `CurvatureSums.add`.

    The first batch of each kind is added uncompiled: it shows where the net has its points, and
    what predictions the targets are for.

    Args:
        bnn: the BNN whose net is linearised.
        sums: what is added to.
    """

    def __init__(self, bnn: Any, sums: CurvatureSums) -> None:
        self._addition, self._sums = _Addition(bnn, sums), sums
        self._programs = Programs("batches of the curvature", next(bnn.parameters()).device)
        self._first: dict[Any, Tensor] = {}
        self._is_small = True

    def __call__(self, inputs: Inputs, given: Any, targets: Targets) -> Tensor:
        """Add a batch and return its outputs; its targets are given as they are, and masked."""
        sums, leaves = self._sums, tree_leaves((inputs, targets))
        key = key_of((inputs, targets)) if are_tensors(leaves) and self._is_small else None
        if key not in self._first:
            outputs = sums.add(inputs, given, targets)
            if key is not None and len(self._first) < MOST_PROGRAMS:
                self._first[key] = outputs
                self._is_small = self._has_few_passes()
            return outputs
        # Before they are looked up in predictions, about which a program says nothing.
        sums.likelihood.check_batch(self._first[key], given)
        sums.accumulator.flush()
        bnn = self._addition.bnn
        held = {f"bnn.{name}": tensor for name, tensor in bnn.named_parameters()}
        held |= {f"bnn.{name}": tensor for name, tensor in bnn.named_buffers()}
        values = [*sums.accumulator.totals.values(), *held.values(), *dense(leaves)]
        values = [value.detach() for value in values]
        program = self._programs.find(key, lambda: self._made(held, (inputs, targets), values))
        if program is None:
            return sums.add(inputs, given, targets)
        (outputs,) = program(*values)
        sums.likelihood.check_predictions(outputs)
        return outputs

    def _made(self, held: Mapping[str, Tensor], batch: Any, values: list[Tensor]) -> Any:
        place, count = tree_flatten(batch)[1], len(self._sums.accumulator.totals)

        def add(*given: Tensor) -> list[Tensor]:
            totals, rest = [*given[:count]], given[count:]
            swapped = dict(zip(held, rest, strict=False))
            inputs, targets = tree_unflatten(rest[len(held) :], place)
            called = (totals, inputs, targets)
            return [torch.func.functional_call(self._addition, swapped, called)]

        return as_program(add, values)

    def _has_few_passes(self) -> bool:
        if (passes := self._sums.passes) <= MOST_PASSES:
            return True
        warn(
            f"compile=True: a batch of the curvature takes {passes} backward passes, one for each "
            f"output, and programs have {MOST_PASSES} at most, so it runs uncompiled: "
            'curvature="fisher" takes one'
        )
        return False
