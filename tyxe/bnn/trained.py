"""BNNs that are trained by steps: the loop over epochs, early stopping, and checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tyxe import check
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
from tyxe.bnn.elbo import MeanWeight
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.training import FitOptions, Trainer
from tyxe.laplace import LaplaceGuide
from tyxe.processes import Processes
from tyxe.rng import RandomStream
from tyxe.threads import exclusive
from tyxe.util import outside_inference


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
        total += float(found if isinstance(found, Tensor) else found["joint"])
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
