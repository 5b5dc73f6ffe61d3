"""The report of a fit, and checkpoints from which it continues."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tyxe import files
from tyxe.errors import warn
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.threads import as_before, exclusive
from tyxe.util import outside_inference


@dataclass
class History:
    """Averages over each epoch, in nats for the whole data set.

    Attributes:
        loss: `beta * kl - log_likelihood`, the negative ELBO for `beta = 1`.
        log_likelihood: expected log-likelihood of the data.
        kl: divergence of the guide from the prior.
        validation: log-likelihood of held-out data, in nats per point; empty without such data.

    Example:
        >>> history = History()
        >>> history.append(loss=3.0, log_likelihood=-1.0, kl=2.0)
        >>> history.loss
        [3.0]
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)

    def append(self, *, loss: float, log_likelihood: float, kl: float) -> None:
        """Add an epoch."""
        self.loss.append(loss)
        self.log_likelihood.append(log_likelihood)
        self.kl.append(kl)


@dataclass
class BestEpoch:
    """The best epoch so far, by the log-likelihood of held-out data per point.

    Attributes:
        score: that log-likelihood, in nats.
        waited: how many epochs came after it.
        state: the BNN's state dict there; None where the fit is not to go back to it.
    """

    score: float = -math.inf
    waited: int = 0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The state of a fit after some epochs.

    `optimizer` and `scheduler` are state dicts, or None where there is none, `kind` is the name of
    the optimiser's class, `rng` has the states of PyTorch's generators, and `best` is None
    without held-out data.
    """

    optimizer: dict[str, Any] | None
    epoch: int
    rng: list[Tensor]
    kind: str
    scheduler: dict[str, Any] | None
    best: BestEpoch | None

    @classmethod
    def of(
        cls, optimizer: Optimizer | None, epoch: int, scheduler: Any, best: BestEpoch | None
    ) -> Checkpoint:
        """Return the checkpoint of a fit after an epoch."""
        return cls(
            None if optimizer is None else copy.deepcopy(optimizer.state_dict()),
            epoch,
            torch_rng(),
            type(optimizer).__name__,
            None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
            copy.deepcopy(best),
        )

    def as_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the checkpoint and of a BNN's state dict, as containers of tensors."""
        state = {name: value.detach().clone() for name, value in state_dict.items()}
        return {"bnn": state, **asdict(self)}

    @classmethod
    def from_dict(cls, checkpoint: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint of a dictionary from `as_dict`, or raise a RuntimeError."""
        names = [field.name for field in fields(cls)]
        missing = {"bnn", *names} - {"best", *checkpoint}  # which older ones have not
        if missing:
            raise RuntimeError(
                f"this is no checkpoint: it has no {', '.join(sorted(missing))}; pass what "
                "bnn.checkpoint() returned, or a plain state dict to load_state_dict"
            )
        found: Checkpoint = files.of_state(cls, {name: checkpoint.get(name) for name in names})
        return found

    def restore(self, optimizer: Optimizer, scheduler: Any, epoch_end: Any) -> int:
        """Restore optimiser, scheduler, the best epoch and generators; return the epochs done.

        An optimiser of another class, or for other parameters, is a ValueError.
        """
        if self.optimizer is not None:
            groups = [len(group["params"]) for group in optimizer.param_groups]
            saved = [len(group["params"]) for group in self.optimizer["param_groups"]]
            if (type(optimizer).__name__, groups) != (self.kind, saved):
                raise ValueError(
                    f"the checkpoint is of the optimiser {self.kind} with groups of {saved} "
                    f"parameters, but this fit has {type(optimizer).__name__} with {groups}; go on "
                    "with an optimiser built as the first was"
                )
            self._check_shapes(optimizer)
            # A copy, because the optimiser changes the tensors of its state in place.
            optimizer.load_state_dict(copy.deepcopy(self.optimizer))
            has_schedule = any("initial_lr" in group for group in self.optimizer["param_groups"])
            if has_schedule and None in (self.scheduler, scheduler):
                warn(
                    "the checkpoint's rate is a scheduler's, whose own state is not in it, or not "
                    "taken up: pass the scheduler as optim, in the first fit and in this one"
                )
        if self.scheduler is not None and scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self.scheduler))
        epoch_end.go_on_from(copy.deepcopy(self.best))
        set_torch_rng(self.rng)
        return self.epoch

    def _check_shapes(self, optimizer: Optimizer) -> None:
        """Refuse states of other shapes, which fused kernels would read beyond their ends."""
        if not type(optimizer).__module__.startswith("torch.optim"):
            return  # others may have states of any shape
        assert self.optimizer is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in self.optimizer["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in self.optimizer["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dim() and not _fits(value, parameter):
                    raise ValueError(
                        f"the checkpoint's optimiser has {name} of shape {tuple(value.shape)} for "
                        f"a parameter of shape {tuple(parameter.shape)}: it is of another BNN"
                    )


def _fits(value: Tensor, parameter: Tensor) -> bool:
    # Factored second moments have one number in the place of many.
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.dim() == parameter.dim() and all(a in (1, b) for a, b in pairs)


class Saved:
    """A module that is saved to files, whole or not at all."""

    state_dict: Any
    load_state_dict: Any

    @property
    def averages_norms(self) -> bool:
        """Whether each draw has statistics of norms from a loader, which is not saved."""
        return False

    def save(self, path: str | os.PathLike[str], training: bool = False) -> None:
        """Save the state to a file, which `load` reads; an earlier file is replaced at the end.

        A process that is killed while it saves, or a full disk, leaves the earlier file, whose mode
        is kept; a link's target is written.

        Args:
            path: the file.
            training: save the `checkpoint` that `fit` goes on from as well.

        Raises:
            OSError: the file cannot be written, or is a folder, a device or the like.
            TypeError: `training` for a wrapper whose `fit` cannot be gone on with.

        Example:
            >>> import tempfile, torch.nn as nn, pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     bnn.save(f"{folder}/bnn.tyxe")
            ...     bnn.load(f"{folder}/bnn.tyxe")
        """
        with as_before():
            self._save(path, training)

    def _save(self, path: str | os.PathLike[str], training: bool) -> None:
        if not training:
            content = self.state_dict()
        elif hasattr(self, "checkpoint"):
            content = self.checkpoint()
        else:
            raise TypeError(
                f"{type(self).__name__} has no fit to go on with: save its state, by save(path)"
            )
        whole = {"training": training, "content": dict(content)}
        files.write(path, {**whole, "averages_norms": True} if self.averages_norms else whole)

    @outside_inference()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what `save` has written; the next `fit` goes on from a training's checkpoint.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: the file is damaged, or not written by `save`, or by a newer version's.
            RuntimeError: it is the state of another BNN, or has NaN or infinities in it. No error
                leaves anything changed.
        """
        saved = files.read(path)
        averaged = isinstance(saved, dict) and saved.pop("averages_norms", False)
        if not isinstance(saved, dict) or set(saved) != {"training", "content"}:
            raise ValueError(f"{path} was not written by the save of a BNN")
        if not saved["training"]:
            self.load_state_dict(saved["content"])
        elif hasattr(self, "load_checkpoint"):
            self.load_checkpoint(saved["content"])
        else:
            raise RuntimeError(f"{path} has a checkpoint, for another wrapper than this")
        if averaged and not self.averages_norms:
            warn(
                "draws had statistics of norms (BatchNorm) from a loader, which is not saved: call "
                "update_norm_statistics(loader), or all draws predict with those of the centre"
            )


class Resumable:
    """A wrapper whose `fit` trains by steps, and goes on where an earlier one stopped."""

    optimizer: Optimizer | None = None
    _scheduler: Any = None
    _best: BestEpoch | None = None
    _pending: Checkpoint | None = None
    _epochs_done = 0

    @contextmanager
    def _resumed(self, trainer: Any, epoch_end: Any) -> Iterator[int]:
        """Restore a loaded checkpoint into a trainer, and yield the first epoch that is left."""
        self.optimizer, self._scheduler = own = trainer.optimizer, trainer.scheduler
        pending, first = self._pending, 0
        with trainer.processes.all_or_none():
            if pending is not None:
                first = pending.restore(*own, epoch_end)
        self._best, self._epochs_done = epoch_end.best, first
        try:
            yield first
        finally:
            if trainer.steps:
                self._pending = None  # a fit that made no step leaves it for the next

    def _end_epoch(self, epoch: int) -> None:
        self._epochs_done, self._pending = epoch + 1, None

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
            taken = Checkpoint.of(*own)
            return (self._pending or taken).as_dict(self.state_dict())  # type: ignore[attr-defined]

    @outside_inference()
    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint, from which the next `fit` continues, with its epochs and schedule.

        Raises:
            RuntimeError: it does not fit this BNN, or is no checkpoint; nothing is changed.
        """
        pending = Checkpoint.from_dict(checkpoint)
        with exclusive():
            self.load_state_dict(checkpoint["bnn"])  # type: ignore[attr-defined]
            self._pending = pending

    def __getstate__(self) -> dict[str, Any]:
        # Without the optimiser, whose state belongs to the parameters of the original.
        gone = {"optimizer": None, "_scheduler": None, "_best": None, "_epochs_done": 0}
        return {**self.__dict__, **gone}
