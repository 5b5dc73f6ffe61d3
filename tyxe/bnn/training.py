"""The steps and epochs of a fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves
from tqdm.auto import tqdm

from tyxe import check
from tyxe.bnn.batches import batches_of, check_iterable, copied, length_of
from tyxe.bnn.captured import CapturedSteps, can_capture
from tyxe.bnn.checkpoint import History
from tyxe.bnn.checks import check_beta, check_one_batch, refuse_nonfinite, warn_of_size
from tyxe.bnn.compiled import CompiledSteps, compiled_steps
from tyxe.bnn.elbo import ElboTerms, MeanWeight, Objective
from tyxe.errors import warn
from tyxe.optim import ParticleOptimizer
from tyxe.optim.groups import make_optimizer, make_scheduler, pyro_clipping, scheduler_of
from tyxe.poutine.variational_laplace import announce_epoch
from tyxe.predictive.forwards import norms_of
from tyxe.processes import Parallel, Processes, checksum, shuffle_anew
from tyxe.program import MOST_PROGRAMS, copy_into
from tyxe.rng import by_generators, current_stream
from tyxe.threads import exclusive, unvalidated
from tyxe.util import Inputs, on_error


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `VariationalBNN.fit` of the same names; `validation` is unpacked."""

    beta: float | Callable[[int], float] = 1.0
    clip_norm: float | None = check.field(None, check.number, above=0)
    lr_multipliers: Mapping[str, float] | None = None
    num_particles: int = check.field(1, check.count)
    closed_form_kl: bool = check.field(True, check.flag)
    parallel: Parallel | None = None
    accumulate_steps: int = check.field(1, check.count)
    autocast: torch.dtype | None = None
    compile: bool = check.field(False, check.flag)
    nan_check: str = check.field("step", check.choice, known=("step", "epoch"))
    scheduler: Any = None
    schedule_by: str = check.field("epoch", check.choice, known=("epoch", "batch"))
    validation: Iterable[Any] | None = None
    patience: int | None = check.field(None, check.count)
    restore_best: bool = check.field(True, check.flag)

    def __post_init__(self) -> None:
        check.fields(self)
        if self.validation is not None:
            check_iterable(self.validation, "validation")
        if not callable(self.beta):
            check_beta(self.beta)
        if self.patience is not None and self.validation is None:
            raise ValueError("patience is for the log-likelihood of held-out data: pass validation")
        if self.compile and self.parallel is not None:
            raise ValueError("compile=True takes one process: leave it out, or parallel")
        hint = " (float16 needs losses that are scaled up, as in a loop of your own)"
        check.choice("autocast", self.autocast, (None, torch.bfloat16), hint)

    def in_precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Let linear maps on a device compute in the precision of `autocast`."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)

    def beta_at(self, epoch: int) -> float:
        """Return the KL's weight in an epoch; raise if it is not 0 or more."""
        return check_beta(self.beta(epoch) if callable(self.beta) else self.beta, epoch)


class Callback:
    """What a fit calls after each batch and epoch; a plain function is called after epochs only.

    Example:
        >>> class Watch(Callback):
        ...     def on_batch(self, bnn, epoch, batch, terms):
        ...         print(f"batch {batch}: {terms.points} points")
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(5, scale=0.1), tyxe.guides.AutoNormal)
        >>> data = [(torch.zeros(5, 2), torch.zeros(5, 1))]
        >>> history = bnn.fit(data, torch.optim.Adam, 1, callback=Watch())
        batch 0: 5 points
    """

    def __call__(self, bnn: Any, epoch: int, loss: float) -> Any:
        """Called with a BNN after an epoch; returning True ends the fit."""

    def on_batch(self, bnn: Any, epoch: int, batch: int, terms: ElboTerms) -> None:
        """Called with a BNN after a step, with data term and KL in nats for the whole data set."""


# What the bars inside of a longer job are of, such as a member of an ensemble.
_BAR_OF: ContextVar[str] = ContextVar("_BAR_OF", default="")


@contextmanager
def bars_named(what: str) -> Iterator[None]:
    """Let bars inside say what they are of."""
    token = _BAR_OF.set(what)
    try:
        yield
    finally:
        _BAR_OF.reset(token)


def progress_bar(items: range | None, what: str, unit: str, progress: bool | None) -> Any:
    """Return an iterator over items, or a counter, with a bar, by default on a terminal only."""
    check.flags(progress=progress)
    disable = None if progress is None else not progress
    what = f"{_BAR_OF.get()} {what}".strip()
    return tqdm(items, desc=what, unit=unit, disable=disable, leave=not _BAR_OF.get())


# Options that are looked at in each epoch, or that processes may have of their own.
_OF_A_PROCESS = ("beta", "parallel", "scheduler", "validation", "patience", "restore_best")
# Copies of what an epoch changes, and the state of the optimiser.
Snapshot = tuple[list[Tensor], dict[str, Any]]


class Trainer:
    """One fit of a `SupervisedBNN` with a `guide` program: optimiser, steps and epochs.

    The optimiser is over the BNN's trainable parameters; without any, this is a ValueError.
    """

    def __init__(self, bnn: Any, optim: Any, options: FitOptions) -> None:
        self.bnn, self.options = bnn, options
        self.parameters = {n: p for n, p in bnn.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("nothing to fit: no parameter of the BNN requires a gradient")
        kinds = bnn._parameter_kinds()
        self.optimizer = make_optimizer(optim, self.parameters, kinds, options.lr_multipliers)
        self.scheduler = scheduler_of(optim, self.parameters)
        if options.scheduler is not None:
            self.scheduler = make_scheduler(options.scheduler, self.optimizer)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                hint = ", as ReduceLROnPlateau compares losses of epochs"
                check.choice("schedule_by", options.schedule_by, ["epoch"], hint)
        self._pyro_clip = pyro_clipping(optim)
        self.objective = Objective(bnn, options.closed_form_kl, options.num_particles)
        own = self.optimizer if isinstance(self.optimizer, ParticleOptimizer) else None
        if own is not None and options.accumulate_steps > 1:
            raise ValueError(
                f"{type(own).__name__} takes gradients itself, of one batch: leave accumulate_steps"
                " out"
            )
        self._own = None if own is None else own.particle_of(self.objective, options)
        self.mean_weight = MeanWeight(bnn.likelihood)
        self.processes = Processes(self.objective, options.parallel)
        self._statistics = statistics_of(bnn.net)
        self._checked = self._warned = False
        self._device = next(iter(self.parameters.values())).device
        self._compiled: CompiledSteps | None = None
        self._captured: CapturedSteps | None = None
        self._changes = 0  # epochs after which programs had to be made anew
        self._compiles = options.compile and own is None
        if options.compile and own is not None:
            warn(f"compile=True: {type(own).__name__} takes gradients itself, and runs uncompiled")
        self.steps = 0

    def epochs(self, first: int, count: int, progress: bool | None) -> Iterator[int]:
        """Yield `count` epochs from the first, with a bar of batches in the reporting process."""
        shown = progress if self.processes.first else False
        options = {n: v for n, v in vars(self.options).items() if n not in _OF_A_PROCESS}
        state = (*self.bnn.state_dict().values(), *tree_leaves(self.optimizer.state_dict()))
        self.processes.check_same(
            **{"first epoch": first, "num_epochs": count, "options": options},
            **{"checksum of weights": checksum(state)},
        )
        self.processes.shards.divide(self.optimizer)
        self.parameters = {n: p for n, p in self.bnn.named_parameters() if p.requires_grad}
        with progress_bar(None, "fit", "batch", shown) as self._bar:
            for epoch in range(first, first + count):
                self._left = first + count - epoch
                yield epoch
                self._bar.total = self._bar.n + (self._left - 1) * self._batches

    def check_programs(self) -> None:
        """Let go programs of what has changed since, as by a callback, but not in each epoch."""
        compiled = self._compiled
        # A net that is refused may change in each forward.
        if compiled is None or compiled.are_none:
            return
        if compiled.are_of(self.objective, self.options.autocast):
            return
        self._compiled = self._captured = None
        self._changes += 1
        if self._changes == MOST_PROGRAMS:
            self._compiles = False
            warn(
                "compile=True: what is fixed in a program, such as an attribute of the net or what "
                f"is trained, has changed after {self._changes} epochs: steps run uncompiled from "
                "now on"
            )

    def run_epoch(
        self,
        loader: Iterable[Any],
        epoch: int,
        device: Any,
        history: History,
        callback: Any = None,
    ) -> None:
        """Make a step for each batch, and append the epoch's averages to the history."""
        self._check_place()
        beta = self.bnn._runtime.beta = self.options.beta_at(epoch)
        size, groups = self.bnn.likelihood.dataset_size, self.optimizer.param_groups
        rates = [{n: v for n, v in group.items() if n != "params"} for group in groups]
        self.processes.check_same(dataset_size=size, beta=beta, optim=rates)
        announce_epoch(self.bnn.net, beta)
        shuffle_anew(loader, epoch, self.options.parallel is not None)
        if self._bar.total is None:
            length = length_of(loader)
            self._bar.total = None if length is None else length * self._left
        self._batches = 0
        before = self._snapshot() if self.options.nan_check == "epoch" else None
        batches = self.processes.equal_batches(batches_of(loader, device))
        remedy = "take smaller batches, of which accumulate_steps makes one step"
        with on_error(self._go_back, before), check.memory_remedy("a step", remedy):
            data, kl, points = self._run_steps(batches, epoch, beta, callback)
        sums = self.processes.total([float(data), float(kl), float(points)])
        if before is not None:
            self._check_epoch(epoch, sums, before)
        size = self.bnn.likelihood.dataset_size
        self._warned = self._warned or warn_of_size(sums[2], size, self._batches)
        weight = 1.0 / sums[2] if sums[2] else 0.0
        log_likelihood, divergence = sums[0] * weight, sums[1] * weight
        loss = beta * divergence - log_likelihood
        history.append(loss=loss, log_likelihood=log_likelihood, kl=divergence)
        self._schedule("epoch", loss)
        self._show(epoch, log_likelihood, divergence, beta)

    def _check_place(self) -> None:
        """Raise a RuntimeError if the BNN was moved since the fit began."""
        now = next(p.device for p in self.bnn.parameters() if p.requires_grad)
        if now != self._device:
            raise RuntimeError(
                f"the BNN was on {self._device} when the fit began, and is on {now}: call "
                "bnn.to(device) before the fit"
            )

    def _run_steps(
        self, batches: Iterator[Any], epoch: int, beta: float, callback: Any
    ) -> tuple[Any, Any, Any]:
        """Make the steps of an epoch; return data term and KL, each times points, and points."""
        data: Any = 0.0
        kl: Any = 0.0
        points: Any = 0
        count = self.options.accumulate_steps
        batches = batches if count == 1 else map(copied, batches)
        # A stream of its own reaches each operation by itself, which takes as long as a small step.
        drawing = nullcontext if current_stream() is None else by_generators
        while group := [*islice(batches, count)]:
            with exclusive(), drawing():
                if not self._checked:
                    with self.processes.all_or_none(), self.processes.shards.whole():
                        check_one_batch(self.bnn, self.bnn._one_draw, *group[0])
                for _, targets in group:
                    self.bnn.likelihood.check_rows(targets)
                # In the first step only, to save the time; the loss of each is checked.
                with unvalidated(self._checked):
                    terms = self.step(group, beta)
                self._checked = True
                self._schedule("batch")
            terms = terms._replace(data=terms.data.detach(), kl=terms.kl.detach())
            data = data + terms.data * terms.points
            kl = kl + terms.kl * terms.points
            points = points + terms.points
            if self._bar.update(len(group)):  # it has been drawn, and so are its numbers
                self._show(epoch, terms.data, terms.kl, beta, refresh=True)
            if isinstance(callback, Callback):
                callback.on_batch(self.bnn, epoch, self._batches, terms)
            self._batches += len(group)
        self._read_captured()
        if self._captured is not None and not self._captured.has_ended:
            self._captured.leave(self.parameters.values())
        return data, kl, points

    def _schedule(self, after: str, loss: float = math.nan) -> None:
        """Let the fit's own scheduler set the rate, after a batch or an epoch."""
        if self.options.scheduler is None or self.options.schedule_by != after:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def _show(self, epoch: int, data: Any, kl: Any, beta: float, refresh: bool = False) -> None:
        """Let the bar say the numbers of a batch or an epoch."""
        if not self._bar.disable:
            data, kl = float(data), float(kl)
            shown = {"loss": beta * kl - data, "data": data, "kl": kl}
            if self._compiled is not None:
                shown["seconds to compile"] = self._compiled.programs.seconds
            numbers = {name: f"{value:.4g}" for name, value in shown.items()}
            self._bar.set_postfix({"epoch": epoch + 1, **numbers}, refresh=refresh)

    def step(self, batches: list[tuple[Inputs, Any]], beta: float) -> ElboTerms:
        """Make one step on a batch, or on several whose gradients add up to that of one.

        A loss or gradient that is not finite is a RuntimeError, and changes neither parameters nor
        statistics of normalising layers.
        """
        shares, load = self._shares(batches)
        terms = self._captured_step(batches, beta, load)
        if terms is not None:
            return terms
        self._read_captured()
        for parameter in self.parameters.values():
            parameter.grad = None
        with self._statistics_kept():
            particles = [
                self._particle(inputs, targets, beta, load, share)
                for (inputs, targets), share in zip(batches, shares, strict=True)
                for _ in range(self.options.num_particles)
            ]
            terms = _mean(particles, shares)
            parameters, norm = self.parameters.values(), None
            if self.options.nan_check == "step":
                norm = gradient_norm(parameters)
                if not bool((terms.data.detach() + terms.kl.detach() + norm).isfinite()):
                    # Targets of other batches than the first are looked at when the loss tells.
                    with self.processes.shards.whole():
                        refuse_nonfinite(self.bnn, terms, batches)
            self._clip(parameters, norm)
            self.optimizer.step()
        self.steps += 1
        return terms

    def _captured_step(
        self, batches: list[tuple[Inputs, Any]], beta: float, load: float | None
    ) -> ElboTerms | None:
        """Make a step as one graph of the device, or return None for one of several launches."""
        is_plain = len(batches) == self.options.num_particles == 1
        if self._compiled is None or not is_plain:
            return None
        if self._captured is None:
            if not can_capture(self.optimizer, self._device):
                return None
            checks, clips = self.options.nan_check == "step", self.options.clip_norm is not None
            self._captured = CapturedSteps(
                self.optimizer,
                self._device,
                self._statistics,
                self._clip if clips or self._pyro_clip is not None else None,
                gradient_norm if checks else None,
            )
        if self._captured.has_ended:
            return None
        with self.options.in_precision(self._device):
            step = self._compiled.find(self.objective, *batches[0], beta, load)
        terms = None if step is None else self._captured(step, batches)
        if terms is not None:
            self.steps += 1
            if self._captured.is_due():
                self._read_captured()
        return terms

    def _read_captured(self) -> None:
        """Raise if a captured step was not finite, which has changed nothing."""
        found = None if self._captured is None else self._captured.read()
        if found is not None:
            with self._statistics_kept():
                refuse_nonfinite(self.bnn, *found)

    def _clip(self, parameters: Iterable[Tensor], norm: Tensor | None = None) -> None:
        """Clip gradients as the fit, or a Pyro optimiser, asks for."""
        parameters = [p for p in parameters if p.grad is not None]
        if self.options.clip_norm is not None:
            norm = gradient_norm(parameters) if norm is None else norm
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip_norm, norm)
        if self._pyro_clip is not None:
            self._pyro_clip(parameters)

    def _snapshot(self) -> Snapshot:
        """Return copies of parameters, statistics of norms and the optimiser's state."""
        tensors = [t.detach().clone() for t in self._changed()]
        return tensors, copy.deepcopy(self.optimizer.state_dict())

    def _changed(self) -> list[Tensor]:
        return [*self.parameters.values(), *self._statistics]

    def _is_finite(self) -> bool:
        finite = torch.stack([p.detach().isfinite().all() for p in self.parameters.values()])
        return bool(finite.all())

    def _restore(self, before: Snapshot) -> None:
        with torch.no_grad():
            for tensor, value in zip(self._changed(), before[0], strict=True):
                tensor.copy_(value)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.load_state_dict(before[1])

    def _go_back(self, before: Snapshot | None) -> None:
        """Go back to an epoch's start if a parameter is not finite by now."""
        if before is not None and not self._is_finite():
            self._restore(before)
        self._check_place()  # which says more than an error of two devices

    def _check_epoch(self, epoch: int, sums: list[float], before: Snapshot) -> None:
        """After an epoch that has met something not finite, go back to its start and raise."""
        if all(map(math.isfinite, sums)) and self._is_finite():
            return
        self._restore(before)
        raise RuntimeError(
            f"training stopped: in epoch {epoch + 1} the loss, or a parameter, is not finite. The "
            'parameters are those before this epoch; nan_check="step" finds the step and the place'
        )

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """After an exception, restore the statistics of norms and drop the gradients."""
        with on_error(self.optimizer.zero_grad), statistics_kept(self._statistics):
            yield

    def _shares(self, batches: list[tuple[Inputs, Any]]) -> tuple[list[float], float | None]:
        """Return the part of a step's points that each batch has, and the data term's weight.

        With several processes it is that of as many as there are in the mean of all.
        """
        if len(batches) == 1 and self.options.parallel is None:
            return [1.0], self.mean_weight.load_of(batches[0][1])
        counts = [self.mean_weight.of(targets) for _, targets in batches]
        weight, points = self.processes.total([sum(each) for each in zip(*counts, strict=True)])
        load = self.mean_weight.load(weight, points)
        self.mean_weight.add(weight, points)
        mean = weight / self.processes.count
        # Where nothing counts, the step is that of the KL.
        return [own / mean if mean else 1.0 / len(counts) for own, _ in counts], load

    def _particle(
        self, inputs: Inputs, targets: Any, beta: float, load: float | None, share: float
    ) -> ElboTerms:
        """Add one draw's gradient of `(beta kl - data) / N / particles`, or the optimiser's own.

        The gradient counts by the batch's share of the points of a step.
        """
        with self.options.in_precision(self._device):
            if self._own is not None:
                self.objective.load = 1.0 if load is None else load
                return ElboTerms(*self._own(inputs, targets, beta))
            # The first is checked, and makes what is made once.
            if self._compiles and self.steps and self._compiled is None:
                self._compiled = compiled_steps(self.objective, self.options.autocast)
            if self._compiled is not None:
                found = self._compiled(self.objective, inputs, targets, beta, load, share)
                if found is not None:
                    return found
            loss = self.processes.objective(inputs, targets, beta, load)
        terms = self.objective.take_terms()
        with _reruns_named():
            (loss if share == 1 else loss * share).backward()
        return terms


def statistics_of(net: nn.Module) -> list[Tensor]:
    """Return what the forwards of normalising layers change before their loss is known."""
    return [buffer for norm in norms_of(net) for buffer in norm.buffers(recurse=False)]


@contextmanager
def statistics_kept(buffers: list[Tensor]) -> Iterator[None]:
    """After an exception, restore the statistics of norms, which a forward has changed."""
    before = [buffer.clone() for buffer in buffers]
    with on_error(copy_into, buffers, before):
        yield


@contextmanager
def _reruns_named() -> Iterator[None]:
    """Say what goes through a graph twice, where PyTorch says only that something does."""
    try:
        yield
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise RuntimeError(
            f"{error} In a fit that is a tensor that the net keeps from an earlier forward, or a "
            "reentrant activation checkpoint, whose backward within the backward goes through the "
            "draws more than once: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        ) from error


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    # A sum of squares overflows in half precision.
    wide = [g if g.element_size() >= 4 else g.float() for g in gradients]
    if all(g.device.type == "cpu" and g.is_contiguous() and type(g) is Tensor for g in wide):
        # Twice as fast as norms on a CPU; on other devices all norms are one kernel.
        wide = [g.view(-1) for g in wide]
        squares = [torch.dot(g, g) for g in wide]
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device="cpu")
    found: Any = torch.nn.utils.get_total_norm(wide)
    return getattr(found, "full_tensor", lambda: found)()  # of parts in several processes


def _mean(particles: list[ElboTerms], shares: list[float]) -> ElboTerms:
    """Return the terms of a step, those of batches by their shares."""
    if len(particles) == 1:
        return particles[0]
    each = len(particles) // len(shares)
    # Of several processes all shares of one may be less than 1.
    weights = [share / (sum(shares) or 1.0) / each for share in shares for _ in range(each)]
    data, kl = (
        torch.stack([w * term.detach() for w, term in zip(weights, terms, strict=True)]).sum()
        for terms in zip(*((terms.data, terms.kl) for terms in particles), strict=True)
    )
    points = sum(terms.points for terms in particles[::each])
    return ElboTerms(data, kl, points, particles[-1].values)
