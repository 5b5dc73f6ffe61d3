"""Whole steps of a fit as CUDA graphs: forward, backward, checks, clipping and the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves

from tyxe.autocast import is_close
from tyxe.bnn.batches import copied
from tyxe.bnn.compiled import CompiledStep, restore
from tyxe.bnn.elbo import ElboTerms
from tyxe.errors import warn
from tyxe.program import Capture, Program, check_equal, copy_into, has_graphs, reason_of
from tyxe.rng import by_generators, set_torch_rng, torch_rng, torch_rng_kept

# The host waits for the device once in so many steps, to see whether all were finite, and keeps
# their batches until then: fewer where these are large.
READ_EVERY, READ_BYTES = 16, 2**26


def can_capture(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether steps of an optimiser can be captured in a graph, and skipped there by a flag."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    return (
        has_graphs(device)
        and type(optimizer) in (Adam, AdamW, SGD)
        and not any(hooks)
        and all(
            group["fused"] and not isinstance(group["lr"], Tensor)
            for group in optimizer.param_groups
        )
    )


class CapturedSteps:
    """The captured steps of one fit, one for each kind of batch.

    A step whose loss or gradient is not finite changes nothing, nor does any after it, until `read`
    says which it was. So the host does not wait for each step. `statistics` are what a forward
    changes before its loss is known; `check` returns a number that is finite if all gradients are.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        statistics: list[Tensor],
        clip: Callable[[list[Tensor]], None] | None,
        check: Callable[[list[Tensor]], Tensor] | None,
    ) -> None:
        self.optimizer, self.statistics, self.clip, self.check = optimizer, statistics, clip, check
        # Steps that were finite since these were read, and whether one was not.
        self.good, self.bad = (torch.zeros((), device=device) for _ in range(2))
        self._unread: list[tuple[ElboTerms, Any]] = []
        self._captures: dict[Program, _Captured] = {}
        self.has_ended = False  # whether no step is captured any more

    def __call__(self, step: CompiledStep, batch: Any) -> ElboTerms | None:
        """Make a step on a batch and return its terms, or None if it has no graph."""
        options = _options_of(self.optimizer)
        places = [tensor.data_ptr() for tensor in _tensors_of(step, self.optimizer)]
        captured = self._captures.get(step.program)
        # A schedule that changes options, such as betas, would want a graph for each step.
        changed = captured is not None and captured.options != options
        if changed or not can_capture(self.optimizer, step.weight.device):
            self._end()
            return None
        if captured is None or captured.places != places:
            try:
                captured = _Captured(self, step, options, places)
            except RuntimeError as error:
                reason = reason_of(error)
                warn(f"compile=True: steps are compiled, and not captured in a graph: {reason}")
                self._end()
                return None
            self._captures[step.program] = captured
        terms = captured(step)
        if self.check is not None:
            self._unread.append((terms, copied(batch)))  # its loader may fill the memory again
        return terms

    def _end(self) -> None:
        """Let the graphs go, with their memory."""
        self.has_ended = True
        self._captures.clear()

    def is_due(self) -> bool:
        """Whether it is time to read which steps were finite."""
        if not self._unread:
            return False
        held = sum(leaf.nbytes for leaf in tree_leaves(self._unread[-1][1]))
        return len(self._unread) >= min(READ_EVERY, READ_BYTES // max(held, 1))

    def read(self) -> tuple[ElboTerms, Any] | None:
        """Wait for the device; return terms and batch of the first step that was not finite."""
        unread, self._unread = self._unread, []
        if not unread:
            return None
        good = int(self.good)
        self.good.zero_()
        self.bad.zero_()
        return unread[good] if good < len(unread) else None

    def leave(self, parameters: Iterable[Tensor]) -> None:
        """Copy the gradients, so that later steps do not overwrite them."""
        for parameter in parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()


class _Captured:
    """The graph of one kind of batch."""

    def __init__(self, steps: CapturedSteps, step: CompiledStep, options: Any, places: Any) -> None:
        self._steps, self.options, self.places = steps, options, places
        groups, device = steps.optimizer.param_groups, step.weight.device
        self._rates = [float(group["lr"]) for group in groups]
        self._on_device = [torch.tensor(rate, device=device) for rate in self._rates]
        batch = [leaf.clone() for leaf in step.batch]
        self._step = step._replace(batch=batch, weight=step.weight.clone())
        kept = [{name: group.get(name) for name in ("lr", "capturable")} for group in groups]
        found_inf = getattr(steps.optimizer, "found_inf", None)
        try:
            for group, rate in zip(groups, self._on_device, strict=True):
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = True
            if steps.check is not None:
                steps.optimizer.found_inf = steps.bad  # type: ignore[attr-defined]
            with by_generators():
                self._run = Capture(self._made, device)
        finally:
            for group, before in zip(groups, kept, strict=True):
                group.update({n: v for n, v in before.items() if n in group})
            steps.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self._compare(step)

    @torch.no_grad()
    def _compare(self, step: CompiledStep) -> None:
        """Raise a RuntimeError if the graph is not the step; what both change is set back."""
        steps, trained = self._steps, step.trained
        changed = [*_tensors_of(step, steps.optimizer), steps.good, steps.bad]
        before, starts = ([t.clone() for t in tensors] for tensors in (changed, trained))
        with torch_rng_kept():
            numbers = torch_rng()
            try:
                expected = self._updated(step)
                moves = [p - start for p, start in zip(trained, starts, strict=True)]
                restore(changed, before)
                set_torch_rng(numbers)
                found = self(step)
                pairs = [(found.data, expected.data), (found.kl, expected.kl)]
                for parameter, start, move in zip(trained, starts, moves, strict=True):
                    pairs.append((parameter - start, move))
            finally:
                restore(changed, before)
        check_equal("a graph of them", is_close, pairs)

    def _updated(self, step: CompiledStep) -> ElboTerms:
        """Make a step on a batch, without what looks for numbers that are not finite."""
        terms, gradients = step()
        self._set_gradients(gradients)
        if self._steps.clip is not None:
            self._steps.clip(step.trained)
        self._steps.optimizer.step()
        return terms

    def _set_gradients(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._step.trained, gradients, strict=True):
            parameter.grad = gradient

    def _made(self) -> ElboTerms:
        steps, trained = self._steps, self._step.trained
        before = [value.clone() for value in steps.statistics]
        terms, self._gradients = self._step()  # whose places the graph writes
        self._set_gradients(self._gradients)
        if steps.check is not None:
            finite = (terms.data + terms.kl + steps.check(trained)).isfinite().to(steps.bad)
            steps.bad.copy_(torch.maximum(steps.bad, 1 - finite))
            steps.good.add_(1 - steps.bad)
            for value, old in zip(steps.statistics, before, strict=True):
                value.copy_(torch.where(steps.bad > 0, old, value))
        if steps.clip is not None:
            steps.clip(trained)
        steps.optimizer.step()
        return terms

    def __call__(self, step: CompiledStep) -> ElboTerms:
        """Make a step on a batch; its terms are copies."""
        own = self._step
        copy_into([*own.batch, own.weight], [*step.batch, step.weight])
        for index, group in enumerate(self._steps.optimizer.param_groups):
            if group["lr"] != self._rates[index]:
                self._rates[index] = group["lr"]
                self._on_device[index].fill_(group["lr"])
        with by_generators():
            terms = self._run()
        self._set_gradients(self._gradients)
        points = terms.points
        points = points.clone() if isinstance(points, Tensor) else points
        return ElboTerms(terms.data.clone(), terms.kl.clone(), points, {})


def _options_of(optimizer: Optimizer) -> Any:
    """Return all options of an optimiser that are constants of a graph."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def _tensors_of(step: CompiledStep, optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors that a graph reads and writes, besides its own."""
    state = (t for own in optimizer.state.values() for t in own.values() if isinstance(t, Tensor))
    return [*step.held, *state]
