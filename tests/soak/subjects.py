"""A small BNN of every wrapper, how it is fitted, and what is in it."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc import HMC
from torch import Tensor

import tyxe
from tests.oracles.states import ADAM, NORMAL, N, data, make, net
from tyxe.continual import TaskLoop
from tyxe.guides import AutoNormal
from tyxe.likelihoods import HomoskedasticGaussian

X, Y = data()
BATCHES = [(X[:5], Y[:5]), (X[5:], Y[5:])]


def _laplace(hidden: int = 4) -> Any:
    return tyxe.LaplaceBNN(net(hidden), NORMAL, HomoskedasticGaussian(N, scale=0.5))


def _mcmc(hidden: int = 4) -> Any:
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    kernel = functools.partial(HMC, step_size=1e-2, num_steps=2)
    return tyxe.MCMC_BNN(net(hidden), NORMAL, likelihood, kernel)


SUBJECTS = {
    "VariationalBNN": lambda hidden=4: make(hidden=hidden),
    "LaplaceBNN": _laplace,
    "PytorchBNN": lambda hidden=4: tyxe.PytorchBNN(net(hidden), NORMAL, AutoNormal),
    "MCMC_BNN": _mcmc,
}


def _own_loop(bnn: Any) -> None:
    """Make the steps that the user of a `PytorchBNN` writes."""
    optimizer = ADAM([p for p in bnn.parameters() if p.requires_grad])
    for x, y in BATCHES:
        ((bnn(x) - y).square().mean() + bnn.cached_kl_loss / N).backward()
        optimizer.step()
        optimizer.zero_grad()


def prepare() -> None:
    """Prepare a process for a suite."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", tyxe.TyxeWarning)


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
