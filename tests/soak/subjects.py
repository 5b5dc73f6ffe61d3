"""A small BNN of every wrapper, how it is fitted, and what is in it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc import HMC
from torch import Tensor, nn

import tyxe
from tyxe.continual import TaskLoop

POINTS = 12
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
_RANDOM = torch.Generator().manual_seed(1)
X = torch.randn(POINTS, 2, generator=_RANDOM)
Y = torch.randn(POINTS, 1, generator=_RANDOM)
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


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
        optimizer.step()
        optimizer.zero_grad()


def fit(bnn: Any) -> None:
    """Fit a BNN for an epoch, or a few transitions."""
    if isinstance(bnn, tyxe.PytorchBNN):
        _own_loop(bnn)
    elif isinstance(bnn, tyxe.MCMC_BNN):
        bnn.fit(BATCHES, 3, warmup_steps=1, disable_progbar=True)
    else:
        bnn.fit(BATCHES, ADAM, 1, progress=False)


def fitted(name: str) -> Any:
    """Return the BNN of a wrapper, fitted once."""
    pyro.set_rng_seed(0)
    bnn = SUBJECTS[name]()
    fit(bnn)
    return bnn


def loop_of(bnn: Any) -> TaskLoop:
    """Return a loop over two tasks."""

    def score(task: Any) -> float:
        if isinstance(bnn, tyxe.PytorchBNN):
            return float(bnn.predict(X).mean())
        return float(bnn.evaluate(X, Y)[0])

    # Draws cannot become a prior.
    update = (lambda task: None) if isinstance(bnn, tyxe.MCMC_BNN) else None
    return TaskLoop(bnn, ["first", "second"], lambda task: fit(bnn), score, update)


def centre_of(bnn: Any) -> Tensor:
    """Return the net's output at the posterior's centre."""
    if isinstance(bnn, tyxe.PytorchBNN):
        return bnn.to_module()(X).detach()
    found = bnn.predict(X, num_predictions=0)
    return found if isinstance(found, Tensor) else found[0]


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
