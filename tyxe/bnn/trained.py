"""BNNs that are trained by steps: the loop over epochs, and checkpoints from which it goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from tyxe import check
from tyxe.bnn.batches import device_for
from tyxe.bnn.checkpoint import (
    BestEpoch,
    Checkpoint,
    History,
    check_checkpoint,
    checkpoint_of,
    fitted_words,
    restore,
)
from tyxe.bnn.epoch_end import EpochEnd
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.training import FitOptions, Trainer
from tyxe.threads import exclusive
from tyxe.util import outside_inference


class TrainedBNN(SupervisedBNN):
    """A BNN whose `fit` trains by steps, and goes on where an earlier one stopped."""

    optimizer: Optimizer | None = None
    _scheduler: Any = None
    _best: BestEpoch | None = None
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
            self._best, self._epochs_done = epoch_end.best, first
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
        """Number of epochs fitted, with those before a checkpoint that the last fit took up."""
        return self._epochs_done

    def _end_epoch(self, epoch: int) -> None:
        self._epochs_done, self._pending = epoch + 1, None
        self._stage = fitted_words(epoch + 1)

    def checkpoint(self) -> dict[str, Any]:
        """Return copies of what a fit needs to continue, as containers of tensors and numbers.

        These are the state dict, the optimiser's and the scheduler's, the number of whole epochs
        done, the best of them by held-out data, and the random generators' states. After an
        interrupt they are those of the last step, and the epoch begins again.

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
            found = self._pending or checkpoint_of(*own)
            return copy.deepcopy({"bnn": self.state_dict(), **found})

    @outside_inference()
    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint, from which the next `fit` continues, with its epochs and schedule.

        Raises:
            RuntimeError: it does not fit this BNN, or is no checkpoint; nothing is changed.
        """
        pending = check_checkpoint(checkpoint)
        with exclusive():
            self.load_state_dict(checkpoint["bnn"])
            self._pending = pending

    def __getstate__(self) -> dict[str, Any]:
        # Without the optimiser, whose state belongs to the parameters of the original.
        gone = {"optimizer": None, "_scheduler": None, "_best": None, "_epochs_done": 0}
        return {**self.__dict__, **gone}
