"""The report of a fit, and checkpoints from which it continues."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tyxe import check, files
from tyxe.errors import warn
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.threads import as_before
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


def fitted_words(num_epochs: int) -> str:
    """Say that a fit went through some epochs."""
    return f"fitted, {num_epochs} epoch{'' if num_epochs == 1 else 's'}"


@dataclass
class BestEpoch:
    """The best epoch so far, by the log-likelihood of held-out data per point, in nats.

    `waited` epochs came after it. `state` is the BNN's there, if the fit is to go back to it.
    """

    score: float = -math.inf
    waited: int = 0
    state: dict[str, Any] | None = None


# What a fit goes on from: state dicts of BNN, optimiser and scheduler, of which the last two may be
# None, the epochs done, the states of generators, the name of the optimiser's class, the fields of
# a `BestEpoch`, or None without held-out data, and the sums of a `MeanWeight`.
_PARTS = {"bnn", "optimizer", "epoch", "rng", "kind", "scheduler", "best", "weights"}
_OF_LATER_VERSIONS = {"best": None, "weights": [0.0, 0.0]}
Checkpoint = dict[str, Any]


def checkpoint_of(
    optimizer: Optimizer | None,
    epoch: int,
    scheduler: Any,
    best: BestEpoch | None,
    weights: list[float],
) -> Checkpoint:
    """Return the checkpoint of a fit after some epochs, without the state dict."""
    return {
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "epoch": epoch,
        "rng": torch_rng(),
        "kind": type(optimizer).__name__,
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "best": None if best is None else asdict(best),
        "weights": weights,
    }


def check_checkpoint(checkpoint: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint without its state dict, or raise a RuntimeError."""
    check.one_of("checkpoint", checkpoint, Mapping, "what bnn.checkpoint() returned")
    missing = _PARTS - {*_OF_LATER_VERSIONS, *checkpoint}
    if missing:
        raise RuntimeError(
            f"this is no checkpoint: it has no {', '.join(sorted(missing))}; pass what "
            "bnn.checkpoint() returned, or a plain state dict to load_state_dict"
        )
    found = {n: checkpoint[n] for n in _PARTS & checkpoint.keys() if n != "bnn"}
    return _OF_LATER_VERSIONS | found


def restore(checkpoint: Checkpoint, optimizer: Optimizer, scheduler: Any, epoch_end: Any) -> int:
    """Restore optimiser, scheduler, the best epoch and generators; return the epochs done.

    An optimiser of another class, or for other parameters, is a ValueError.
    """
    given = copy.deepcopy(checkpoint)  # an optimiser changes the tensors of its state in place
    if given["optimizer"] is not None:
        groups = [len(group["params"]) for group in optimizer.param_groups]
        saved = [len(group["params"]) for group in given["optimizer"]["param_groups"]]
        if (type(optimizer).__name__, groups) != (given["kind"], saved):
            raise ValueError(
                f"the checkpoint is of the optimiser {given['kind']} with groups of {saved} "
                f"parameters, but this fit has {type(optimizer).__name__} with {groups}; go on "
                "with an optimiser built as the first was"
            )
        _check_shapes(given["optimizer"], optimizer)
        optimizer.load_state_dict(given["optimizer"])
        has_schedule = any("initial_lr" in group for group in given["optimizer"]["param_groups"])
        if has_schedule and None in (given["scheduler"], scheduler):
            warn(
                "the checkpoint's rate is a scheduler's, whose own state is not in it, or not "
                "taken up: pass the scheduler as optim, in the first fit and in this one"
            )
    if given["scheduler"] is not None and scheduler is not None:
        scheduler.load_state_dict(given["scheduler"])
    epoch_end.go_on_from(None if given["best"] is None else BestEpoch(**given["best"]))
    set_torch_rng(given["rng"])
    return int(given["epoch"])


def _check_shapes(state: dict[str, Any], optimizer: Optimizer) -> None:
    """Refuse states of other shapes, which fused kernels would read beyond their ends."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # others may have states of any shape
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in state["state"].get(index, {}).items():
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
    """A module that is saved to files, never in part."""

    state_dict: Any
    load_state_dict: Any

    @property
    def _averages_norms(self) -> bool:
        """Whether each draw has statistics of norms from a loader, which is not saved."""
        return False

    @as_before()
    @check.arguments
    def save(self, path: str | os.PathLike[str], training: bool = False) -> None:
        """Save the state to a file, which `load` reads; an earlier file is replaced at the end.

        If the process is killed meanwhile, or the disk is full, the earlier file stays. Its mode is
        kept. If `path` is a link, its target is written.

        Args:
            path: the file.
            training: also save the `checkpoint` from which `fit` continues.

        Raises:
            OSError: the file cannot be written, or is a folder, a device or the like.
            TypeError: `training` for a wrapper whose `fit` cannot be resumed.

        Example:
            >>> import tempfile, torch.nn as nn, pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     bnn.save(f"{folder}/bnn.tyxe")
            ...     bnn = bnn.load(f"{folder}/bnn.tyxe")
        """
        if not training:
            content = self.state_dict()
        elif hasattr(self, "checkpoint"):
            content = self.checkpoint()
        else:
            raise TypeError(
                f"{type(self).__name__} has no fit to go on with: save its state, by save(path)"
            )
        files.write(path, {"training": training, "content": dict(content), **self._not_saved()})

    @outside_inference()
    @check.arguments
    def load(self, path: str | os.PathLike[str]) -> Any:
        """Load a file of `save`, and return itself; `fit` continues from a checkpoint in it.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: the file is damaged, not written by `save`, or of a newer version.
            RuntimeError: it is the state of another BNN, or contains NaN or infinities. Errors
                leave everything unchanged.
        """
        saved = files.read(path)
        if not isinstance(saved, dict) or {*saved} - {"averages_norms"} != {"training", "content"}:
            kind = saved.get("calibrator") if isinstance(saved, dict) else None
            hint = f", but of a {kind}: call Calibrated(bnn, {kind}()).load(path)" if kind else ""
            raise ValueError(f"{path} was not written by the save of a BNN{hint}")
        if not saved["training"]:
            self.load_state_dict(saved["content"])
        elif hasattr(self, "load_checkpoint"):
            self.load_checkpoint(saved["content"])
        else:
            raise RuntimeError(f"{path} has a checkpoint, for another wrapper than this")
        self._warn_of_not_saved(saved)
        return self

    def _not_saved(self) -> dict[str, bool]:
        """Return what a file says of a loader of statistics of norms, which is not in it."""
        return {"averages_norms": True} if self._averages_norms else {}

    def _warn_of_not_saved(self, saved: Mapping[str, Any]) -> None:
        if "averages_norms" in saved and not self._averages_norms:
            warn(
                "draws had statistics of norms (BatchNorm) from a loader, which is not saved: call "
                "update_norm_statistics(loader), or all draws predict with those of the centre"
            )
