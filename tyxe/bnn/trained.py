"""BNNs that are trained by steps: the loop over epochs, or as a module in any other loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
from tyxe.bnn.base import set_train_mode
from tyxe.bnn.batches import batches_of, device_for
from tyxe.bnn.checkpoint import (
    BestEpoch,
    Checkpoint,
    History,
    check_checkpoint,
    checkpoint_of,
    fitted_words,
    restore,
)
from tyxe.bnn.checks import are_finite, check_beta, check_one_batch, refuse_nonfinite
from tyxe.bnn.elbo import ElboTerms, MeanWeight, Objective
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.scoring import reduced, rows_of, together
from tyxe.bnn.training import FitOptions, Trainer, statistics_kept, statistics_of
from tyxe.check import described
from tyxe.data import Targets, Unpack
from tyxe.laplace import LaplaceGuide
from tyxe.predictive.evaluation import mixture_scores
from tyxe.processes import Processes
from tyxe.rng import RandomStream
from tyxe.threads import exclusive, unvalidated
from tyxe.util import at_least_float32, outside_inference


class EpochEnd:
    """What happens after each epoch: a callback, and held-out data that may end the fit.

    Ties of the held-out log-likelihood count as no improvement. Several processes decide together,
    by sums over what each has: held-out data, a callback that ends the fit.
    """

    def __init__(
        self, bnn: Any, callback: Any, options: FitOptions, device: Any, processes: Processes
    ) -> None:
        check.one_of("callback", callback, Callable | None, "a function, or None")
        self._bnn, self._callback, self._options = bnn, callback, options
        self._device, self._processes = device, processes
        validates = options.validation is not None
        found = processes.total([validates, validates and options.restore_best])
        self.best = BestEpoch() if found[0] else None
        self._restores = bool(found[1])

    @property
    def _is_over(self) -> bool:
        patience = self._options.patience
        return None not in (self.best, patience) and self.best.waited >= patience  # type: ignore[union-attr,operator]

    def go_on_from(self, best: BestEpoch | None) -> None:
        """Continue with the best epoch of an earlier fit, if this one can go back to it."""
        if None not in (self.best, best) and (best.state or not self._restores):  # type: ignore[union-attr]
            self.best = best

    def epochs_left(self, count: int) -> int:
        """Return how many of so many epochs are left, none if the earlier fit was complete."""
        return 0 if self._processes.total([self._is_over])[0] else count

    def ends(self, epoch: int, history: History) -> bool:
        """Process an epoch that has ended, and return whether the fit ends."""
        if self.best is not None:
            self._look(self.best, history)
        self._bnn._end_epoch(epoch)
        with self._processes.all_or_none():
            called = self._callback is not None
            stops = bool(called and self._callback(self._bnn, epoch, history.loss[-1]))
        return self._processes.total([stops or self._is_over])[0] > 0

    def _look(self, best: BestEpoch, history: History) -> None:
        loader = self._options.validation
        with self._processes.all_or_none():
            own = (0.0, 0.0) if loader is None else held_out_sums(self._bnn, loader, self._device)
        total, points = self._processes.total([*own])
        found = total / points if points else math.nan
        history.validation.append(found)
        best.waited += 1
        if found > best.score:
            best.score, best.waited = found, 0
            best.state = copy.deepcopy(self._bnn.state_dict()) if self._restores else None

    def restore_best(self) -> None:
        """Go back to the best epoch, and restart the patience for a further fit."""
        best = self.best
        if best is None or not best.waited:
            return
        is_over = self._is_over
        if best.state is not None:
            stage = self._bnn._stage
            self._bnn.load_state_dict(best.state)
            self._bnn._stage = f"{stage}, weights of the best"
        if is_over or best.state is not None:
            best.waited, self._bnn._pending = 0, None


def draws_to_judge(bnn: Any) -> int:
    """Return the draws by which a training is judged: 8, or 0 of what has no spread yet."""
    is_mode = isinstance(getattr(bnn, "net_guide", None), LaplaceGuide)
    return 8 if bnn._draws_of_weights() > 1 and not is_mode else 0


def held_out_sums(bnn: Any, loader: Iterable[Any], device: Any) -> tuple[float, float]:
    """Return the log-likelihood of held-out data, in nats, and how many points it is of.

    It is by the same draws in each call.
    """
    draws = draws_to_judge(bnn)
    total = points = 0.0
    for inputs, targets in batches_of(bnn._to_evaluate(loader), device):
        with RandomStream(seed=0):
            found = bnn.evaluate(inputs, targets, draws)[1]
        total += float(together(found))
        points += float(bnn.likelihood.count(targets))
    return total, points


class TrainedBNN(SupervisedBNN):
    """A BNN whose `fit` trains by steps, and can continue an earlier fit."""

    optimizer: Optimizer | None = None
    _scheduler: Any = None
    _best: BestEpoch | None = None
    _mean_weight: MeanWeight | None = None
    _pending: Checkpoint | None = None
    _epochs_done = 0

    def _train(
        self,
        loader: Iterable[Any],
        optim: Any,
        num_epochs: int,
        callback: Callable[[Any, int, float], Any] | None,
        device: Any,
        progress: bool | None,
        options: FitOptions,
        after_epoch: Callable[[int], None] | None = None,
    ) -> History:
        """Fit by epochs, after each of which a function may update the prior."""
        check.flags(progress=progress)
        history, device = History(), device_for(self, device)
        with fitting(self, train=True), prior_fixed(self):
            trainer = Trainer(self, optim, options)
            epoch_end = EpochEnd(self, callback, options, device, trainer.processes)
            self.optimizer, self._scheduler = own = trainer.optimizer, trainer.scheduler
            first = 0
            with trainer.processes.all_or_none():
                if self._pending is not None:
                    first = restore(self._pending, *own, epoch_end)
                    trainer.mean_weight.sums = [*self._pending["weights"]]
            self._best, self._epochs_done = epoch_end.best, first
            self._mean_weight = trainer.mean_weight
            left = epoch_end.epochs_left(num_epochs)
            try:
                for epoch in trainer.epochs(first, left, progress):
                    if callback is not None or after_epoch is not None:
                        trainer.check_programs()
                    trainer.run_epoch(loader, epoch, device, history, callback)
                    if after_epoch is not None:
                        with prior_fixed(self, False):
                            after_epoch(epoch)
                    with trainer.processes.shards.whole():
                        is_over = epoch_end.ends(epoch, history)
                    if is_over:
                        break
            finally:
                trainer.processes.shards.gather(trainer.optimizer)
                if trainer.steps:
                    self._pending = None  # a fit that made no step leaves it for the next
            epoch_end.restore_best()
        return history

    @property
    def epochs_done(self) -> int:
        """Number of epochs fitted, including those before a checkpoint that was loaded."""
        return self._epochs_done if self._pending is None else int(self._pending["epoch"])

    def _end_epoch(self, epoch: int) -> None:
        self._epochs_done, self._pending = epoch + 1, None
        self._stage = fitted_words(epoch + 1)

    def checkpoint(self) -> dict[str, Any]:
        """Return copies of what a fit needs to continue, as containers of tensors and numbers.

        These are the state dicts of BNN, optimiser and scheduler, the number of complete epochs,
        the best epoch by held-out data, and the states of the random generators. After an interrupt
        they are those of the last step, and the epoch begins again.

        Example:
            >>> import torch, pyro.distributions as dist, tyxe
            >>> def make():
            ...     return tyxe.VariationalBNN(
            ...         torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...         tyxe.likelihoods.HomoskedasticGaussian(5, scale=1.0),
            ...         tyxe.guides.AutoNormal)
            >>> bnn, data = make(), [(torch.ones(5, 1), torch.ones(5, 1))]
            >>> _ = bnn.fit(data, torch.optim.Adam, 3)
            >>> resumed = make()
            >>> resumed.load_checkpoint(bnn.checkpoint())
            >>> bool(resumed.fit(data, torch.optim.Adam, 2).loss)
            True
        """
        with exclusive():
            own = self.optimizer, self._epochs_done, self._scheduler, self._best
            sums = [0.0, 0.0] if self._mean_weight is None else self._mean_weight.sums
            found = self._pending or checkpoint_of(*own, sums)
            return copy.deepcopy({"bnn": self.state_dict(), **found})

    @outside_inference()
    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint, from which the next `fit` continues, with its epochs and schedule.

        Raises:
            RuntimeError: it does not fit this BNN, or is not a checkpoint; nothing is changed.
        """
        pending = check_checkpoint(checkpoint)
        with exclusive():
            self.load_state_dict(checkpoint["bnn"])
            self._pending = pending

    def __getstate__(self) -> dict[str, Any]:
        # Without the optimiser, whose state belongs to the parameters of the original.
        gone = dict.fromkeys(("optimizer", "_scheduler", "_best", "_mean_weight"))
        return {**self.__dict__, **gone, "_epochs_done": 0}


Handler = Callable[[], AbstractContextManager[Any]]


class Scored(NamedTuple):
    """A batch of held-out data under draws from the posterior.

    Attributes:
        predictions: as returned by `predict`, for all points.
        error: as returned by `evaluate`: of points that count, or their sum; by part for a `Joint`.
        log_likelihood: likewise, of the mixture over draws, in nats.
        weights: how often each of these points counts; by part for a `Joint`.
    """

    predictions: Any
    error: Any
    log_likelihood: Any
    weights: Any


class Trainable(Objective):
    """A BNN as a module whose forward is the loss of a batch, for any loop, trainer or launcher.

    The loss is that of `fit`, `(beta KL - E_q log p(D | w)) / N` for one draw, in nats per data
    point. Train `parameters()`, as for any module. The BNN is not copied.

    Args:
        bnn: a BNN that is trained in steps: variational, dropout, or the mode of a `LaplaceBNN`.
        unpack: from a batch to `inputs, targets` or `inputs, targets, weights`.
        handler: makes the handler of each step, such as `tyxe.poutine.local_reparameterization`.
        beta: weight of the KL, an attribute that may be changed between steps. The default is 1, or
            the temperature of a `LaplaceBNN`, whose curvature a step removes.
        num_predictions: number of draws for held-out data; 0 is the posterior's centre. The default
            is 8, or 0 if nothing has a spread.

    Attributes:
        terms: the terms of the latest forward, without their graph.

    Raises:
        TypeError: the BNN is not fitted in steps.
        ValueError: `beta` is negative or not finite; in a forward, targets that do not fit the
            likelihood, or more points than `dataset_size`.
        RuntimeError: in a forward, a loss that is not finite, or infinite inputs with gradients
            that are not. Norm statistics are not changed then.

    Example:
        >>> import torch, pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
        >>> module = Trainable(bnn, handler=tyxe.poutine.local_reparameterization)
        >>> optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        >>> loss = module((torch.zeros(5, 2), torch.arange(5) % 3))
        >>> loss.backward()
        >>> optimizer.step()
    """

    terms: ElboTerms | None

    def __init__(
        self,
        bnn: SupervisedBNN,
        *,
        unpack: Unpack | None = None,
        handler: Handler = nullcontext,
        beta: float | None = None,
        num_predictions: int | None = None,
    ) -> None:
        if not isinstance(bnn, SupervisedBNN) or not hasattr(bnn, "_guide"):
            raise TypeError(
                f"bnn is {described(bnn)}; expected one that is fitted in steps, such as "
                "tyxe.VariationalBNN. A PytorchBNN is a module for your own loops, members of an "
                "EnsembleBNN are trained one by one, and MCMC_BNN has its own fit"
            )
        super().__init__(bnn, closed_form_kl=True, num_particles=1)
        self.unpack, self.handler = unpack, handler
        self.beta = check_beta(getattr(bnn, "temperature", 1.0) if beta is None else beta)
        if num_predictions is None:
            num_predictions = draws_to_judge(bnn)
        self.num_predictions = num_predictions
        self._is_checked, self._statistics = False, statistics_of(bnn.net)
        self._mean_weight = MeanWeight(bnn.likelihood)

    def train(self, mode: bool = True) -> Trainable:
        """Set the mode; parts of the net whose parameters are all frozen keep theirs."""
        super().train(False)
        self.training = mode
        if mode:
            set_train_mode(self.bnn)
        return self

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        """Return the loss of a batch by one draw, in nats per data point.

        Raises:
            ValueError: a batch that `fit` refuses, or a batch with only NaN targets.
        """
        loader = self.bnn._to_fit([batch], self.unpack)
        ((inputs, targets),) = batches_of(loader, device_for(self.bnn))
        if isinstance(targets, Targets) and bool(targets.values.isnan().all()):
            raise ValueError(
                "all targets of the batch are NaN, which stands for one that is missing: leave the "
                "batch out, or look for what has made them NaN"
            )
        with exclusive():
            if not self._is_checked:
                check_one_batch(self.bnn, self.bnn._mean_values, inputs, targets)
            self.bnn.likelihood.check_rows(targets)
            beta = self.bnn._runtime.beta = check_beta(self.beta)
            # In the first step only, to save the time; the loss of each is checked.
            self.bnn._before_step()
            with statistics_kept(self._statistics), unvalidated(self._is_checked), self.handler():
                weights = self._mean_weight.of(targets)
                load = self._mean_weight.load(*weights)
                loss = super().forward(inputs, targets, beta, load)
                terms = self.take_terms()
                gradients = {} if are_finite(inputs) else self._gradients(loss)
                if not all(bool(t.isfinite().all()) for t in (loss.detach(), *gradients.values())):
                    refuse_nonfinite(self.bnn, terms, [(inputs, targets)], gradients)
            if self.training:
                self._mean_weight.add(*weights)
            self._is_checked, self.bnn._stage = True, "trained in your own loop"
            self.terms = terms._replace(data=terms.data.detach(), kl=terms.kl.detach(), values={})
        return loss

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return a loss's gradients, in which infinite inputs show where the net saturates.

        For other inputs, this would take too long. Some infinite inputs, such as masks, have a use.
        """
        found = {name: p for name, p in self.bnn.named_parameters() if p.requires_grad}
        if not loss.requires_grad or not found:
            return {}
        given = [*found.values()]
        try:
            values = torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "incompatible with .grad()" in str(error):  # a reentrant checkpoint, whose own
                return {}  # backward is the only one that it takes
            raise
        return {n: v for n, v in zip(found, values, strict=True) if v is not None}

    def score_batch(self, batch: Any, reduction: str = "none") -> Scored:
        """Predict a batch of held-out data, and score it, for each point or as a `"sum"`."""
        loader = self.bnn._to_evaluate([batch], self.unpack)
        ((inputs, targets),) = batches_of(loader, device_for(self.bnn))
        likelihood = self.bnn.likelihood
        with self.bnn._predicting():
            outputs, latents = self.bnn._stacked_outputs(inputs, self.num_predictions)
            kept, rows = likelihood.counted(targets)
            found = mixture_scores(likelihood, rows_of(outputs, rows, 1), latents, kept)
            predictions = likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)
        parts = found.error, found.log_likelihood, likelihood.score_counts(kept)
        error, log_likelihood = reduced(likelihood, parts, reduction)
        return Scored(predictions, error, log_likelihood, likelihood.named(parts[-1], -2))

    judge = score_batch  # its former name
