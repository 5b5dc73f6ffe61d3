"""A BNN goes with what it holds, without the garbage collector, and so does what a fit took."""

import gc
import logging
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import ADAM, NORMAL
from tyxe.likelihoods import HomoskedasticGaussian

X, Y = torch.linspace(-1, 1, 8)[:, None], torch.linspace(1, -1, 8)[:, None]


def parts() -> Any:
    return nn.Linear(1, 1), NORMAL, HomoskedasticGaussian(len(X), scale=0.5)


def variational(**options: Any) -> tyxe.VariationalBNN:
    bnn = tyxe.VariationalBNN(*parts(), tyxe.guides.AutoNormal)
    bnn.fit([(X, Y)], ADAM, 2, **options)
    return bnn


def laplace() -> tyxe.LaplaceBNN:
    net, _, likelihood = parts()
    return bnns.laplace(net, likelihood, [(X, Y)])


def loaded() -> tyxe.LaplaceBNN:
    bnn = tyxe.LaplaceBNN(*parts())
    bnn.load_state_dict(laplace().state_dict())
    return bnn


def chains(kernel: Any, **options: Any) -> tyxe.MCMC_BNN:
    bnn = tyxe.MCMC_BNN(*parts(), kernel)
    bnn.fit([(X, Y)], 2, warmup_steps=2, num_chains=2, **options)
    return bnn


MAKE: dict[str, Callable[[], Any]] = {
    "VariationalBNN": variational,
    "VariationalBNN, compiled": partial(variational, compile=True),
    "LaplaceBNN": laplace,
    "LaplaceBNN, loaded": loaded,
    "MCMC_BNN by NUTS": partial(chains, tyxe.samplers.NUTS),
    "MCMC_BNN by SGLD": partial(chains, tyxe.samplers.SGLD(1e-3)),
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_a_bnn_goes_when_it_is_let_go(make: Callable[[], Any], uncollected: None) -> None:
    bnn = make()
    bnn.predict(X, num_predictions=2)
    held = [weakref.ref(bnn), *(weakref.ref(tensor) for tensor in bnn._in_places().values())]
    del bnn
    assert [reference() for reference in held] == [None] * len(held)


def test_a_run_outlives_its_bnn() -> None:
    bnn = tyxe.MCMC_BNN(*parts(), tyxe.samplers.HMC(num_steps=2))
    run: Any = bnn.fit([(X, Y)], 4, warmup_steps=300, num_chains=2)
    expected = run.get_samples(group_by_chain=True)
    del bnn
    found = run.get_samples(group_by_chain=True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_curvature_is_loaded_within_a_module() -> None:
    one, other = (nn.ModuleDict({"bnn": tyxe.LaplaceBNN(*parts())}) for _ in range(2))
    one["bnn"].fit_curvature([(X, Y)])
    other.load_state_dict(one.state_dict())
    found, expected = other["bnn"].predict(X), one["bnn"].predict(X)
    assert all(map(torch.equal, found, expected))


def test_vectorised_fits_take_no_memory_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # What tracers log is kept by pytest.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    ensemble = tyxe.EnsembleBNN(lambda k: tyxe.VariationalBNN(*parts(), tyxe.guides.AutoNormal), 2)

    def grown() -> float:
        """Return the bytes that each of four fits left behind."""
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            ensemble.fit([(X, Y)], ADAM, 1, vectorize=True, progress=False)
            gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / 4

    tracemalloc.start()
    try:
        grown()
        # What is kept for each fit grows in every round. A table of PyTorch's that takes a larger
        # size, after many other tests, does so in one.
        least = min(grown() for _ in range(3))
    finally:
        tracemalloc.stop()
    assert least < 2_000
