"""Mistakes in fits of an `MCMC_BNN`, and uses of it before one."""

import copy
import functools

import pytest
import torch
from pyro.infer.mcmc import HMC

import tyxe
from tests.oracles.rejections import ADAM, LIKELIHOOD, PRIOR, X, Y, net, rejects


def mcmc():
    return tyxe.MCMC_BNN(
        net(), PRIOR, LIKELIHOOD, functools.partial(HMC, step_size=0.01, num_steps=2)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda bnn: bnn.predict(X),
        lambda bnn: bnn.predict(X, num_predictions=0),
        lambda bnn: bnn.evaluate(X, Y),
        lambda bnn: bnn.to_module(),
        lambda bnn: bnn.get_samples(),
        lambda bnn: bnn.to_arviz(),
    ],
)
def test_mcmc_before_fitting(call):
    if call.__code__.co_names == ("to_arviz",):
        pytest.importorskip("arviz", reason="needs the extra `mcmc`")
    bnn = mcmc()
    rejects(
        bnn,
        RuntimeError,
        r"no samples yet; call fit\(data_loader, num_samples\)",
        lambda: call(bnn),
    )


MCMC_FITS = {
    "an optimiser in num_samples' place": (([(X, Y)], ADAM), TypeError, "num_samples is a partial"),
    "an empty loader": (([], 2), ValueError, "loader is empty"),
    "no pairs": (([X], 2), ValueError, "the loader yields a Tensor; expected "),
    "targets that would broadcast": (([(X, Y[:, 0])], 2), ValueError, "targets.unsqueeze"),
    "too many points": (([(X, Y), (X, Y)], 2), ValueError, "has 16 points.*dataset_size=8"),
}


@pytest.mark.parametrize("steps", ["1", 1.5])
def test_mcmc_takes_whole_numbers_of_warmup_steps(steps):
    message = "warmup_steps is .*1.*; expected an integer"
    bnn = mcmc()
    rejects(bnn, TypeError, message, lambda: bnn.fit([(X, Y)], 2, warmup_steps=steps))


@pytest.mark.parametrize("case", MCMC_FITS)
def test_mcmc_fit_rejects(case):
    args, error, message = MCMC_FITS[case]
    bnn = mcmc()
    rejects(bnn, error, message, lambda: bnn.fit(*args, disable_progbar=True))
    bnn.fit([(X, Y)], 2, warmup_steps=1, disable_progbar=True)
    samples = copy.deepcopy(bnn.get_samples())
    rejects(bnn, error, message, lambda: bnn.fit(*args, disable_progbar=True))
    assert all(torch.equal(bnn.get_samples()[n], v) for n, v in samples.items())
