"""A small BNN of every wrapper, with all that can be stopped in it, and what is in it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc import HMC
from torch import Tensor, nn

import tyxe
from tyxe.continual import TaskLoop
from tyxe.threads import exclusive

__all__ = ["SUBJECTS", "Subject", "centre_of", "digest", "subject"]

POINTS, TASKS = 12, ["first", "second"]
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
_RANDOM = torch.Generator().manual_seed(1)
X = torch.randn(POINTS, 2, generator=_RANDOM)
Y = torch.randn(POINTS, 1, generator=_RANDOM)
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


class Subject(NamedTuple):
    """A BNN, a loop over tasks for it, and calls by name; those in `keeping` change no weight."""

    bnn: Any
    file: Path
    loop: Callable[[], TaskLoop]
    calls: Mapping[str, Callable[[], Any]]
    keeping: frozenset[str]


def _net(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1))


def _gaussian(scale: Any = 0.5) -> Any:
    return tyxe.likelihoods.HomoskedasticGaussian(POINTS, scale=scale)


def variational(hidden: int = 4) -> Any:
    guide = tyxe.guides.AutoNormal
    likelihood = _gaussian(dist.LogNormal(-1.0, 0.5))
    return tyxe.VariationalBNN(_net(hidden), NORMAL, likelihood, guide, guide)


def laplace(hidden: int = 4) -> Any:
    return tyxe.LaplaceBNN(_net(hidden), NORMAL, _gaussian())


def pytorch(hidden: int = 4) -> Any:
    return tyxe.PytorchBNN(_net(hidden), NORMAL, tyxe.guides.AutoNormal)


def mcmc(hidden: int = 4) -> Any:
    kernel = functools.partial(HMC, step_size=1e-2, num_steps=2)
    return tyxe.MCMC_BNN(_net(hidden), NORMAL, _gaussian(dist.LogNormal(-1.0, 0.5)), kernel)


SUBJECTS = {
    "VariationalBNN": variational,
    "LaplaceBNN": laplace,
    "PytorchBNN": pytorch,
    "MCMC_BNN": mcmc,
}


def _own_loop(bnn: Any) -> None:
    """Make the steps that the user of a `PytorchBNN` writes."""
    optimizer = ADAM([p for p in bnn.parameters() if p.requires_grad])
    for x, y in BATCHES:
        ((bnn(x) - y).square().mean() + bnn.cached_kl_loss / POINTS).backward()
        with exclusive():  # since an interrupt in PyTorch's own code may leave gradients off
            optimizer.step()
            optimizer.zero_grad()


def _fit(bnn: Any) -> Callable[[], Any]:
    if isinstance(bnn, tyxe.PytorchBNN):
        return lambda: _own_loop(bnn)
    if isinstance(bnn, tyxe.MCMC_BNN):
        return lambda: bnn.fit(BATCHES, 3, warmup_steps=1, disable_progbar=True)
    return lambda: bnn.fit(BATCHES, ADAM, 1, progress=False)


def centre_of(bnn: Any) -> Tensor:
    """Return the net's output at the posterior's centre."""
    if isinstance(bnn, tyxe.PytorchBNN):
        return bnn.to_module()(X).detach()
    found = bnn.predict(X, num_predictions=0)
    return found if isinstance(found, Tensor) else found[0]


def subject(name: str, folder: Path) -> Subject:
    """Return the BNN of a wrapper, fitted once; its files are in a folder."""
    pyro.set_rng_seed(0)
    bnn = SUBJECTS[name]()
    fit = _fit(bnn)
    fit()
    file, supervised = folder / f"{name}.tyxe", not isinstance(bnn, tyxe.PytorchBNN)
    calls: dict[str, Callable[[], Any]] = {
        "fit": fit,
        "predict": lambda: bnn.predict(X, num_predictions=2),
        "save": lambda: bnn.save(file, training=hasattr(bnn, "checkpoint")),
        "load": lambda: bnn.load(file),
    }
    if supervised:
        calls["evaluate"] = lambda: bnn.evaluate(BATCHES, num_predictions=2)
    if name == "LaplaceBNN":
        calls["fit_curvature"] = lambda: bnn.fit_curvature(BATCHES, progress=False)
    bnn.save(file)

    def loop() -> TaskLoop:
        def score(task: Any) -> float:
            return float(bnn.evaluate(X, Y)[0]) if supervised else float(bnn.predict(X).mean())

        # Draws cannot become a prior.
        update = (lambda task: None) if name == "MCMC_BNN" else None
        return TaskLoop(bnn, TASKS, lambda task: fit(), score, update)

    def run_loop() -> None:
        checkpoint = folder / f"{name}.loop"
        checkpoint.unlink(missing_ok=True)
        loop().run(checkpoint)

    calls["TaskLoop"] = run_loop
    return Subject(bnn, file, loop, calls, frozenset({"predict", "evaluate", "save"}))


def digest(state: Any) -> str:
    """Return a hash of nested containers of tensors and plain values."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().cpu().numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            found.update(str(len(value)).encode())
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()
