"""Counts are integers of any library, and nothing else."""

import functools

import pytest
import torch
from pyro.infer.mcmc import HMC

import tyxe
from tests.oracles.rejections import ADAM, LIKELIHOOD, PRIOR, N, X, Y, make, net, rejects
from tyxe.likelihoods import Categorical

numpy = pytest.importorskip("numpy")

OF_LIBRARIES = [numpy.int32, numpy.int64, torch.tensor]


def laplace():
    bnn = tyxe.LaplaceBNN(net(), PRIOR, LIKELIHOOD)
    bnn.fit_curvature([(X, Y)])
    return bnn


def chain(samples):
    kernel = functools.partial(HMC, step_size=0.01, num_steps=1)
    bnn = tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, kernel)
    bnn.fit([(X, Y)], samples, warmup_steps=1, disable_progbar=True)
    return len(bnn.get_samples()["net.0.bias"])


COUNTS = {
    "num_epochs": lambda n: len(make().fit([(X, Y)], ADAM, n).loss),
    "num_particles": lambda n: make().fit([(X, Y)], ADAM, 2, num_particles=n) and 2,
    "num_predictions": lambda n: len(make().predict(X, num_predictions=n, aggregate=False)),
    "batch_size": lambda n: len(make().predict(X, batch_size=n)) and 2,
    "num_samples": lambda n: len(make().sample_predictive(X, num_samples=n)),
    "num_samples of a chain": chain,
    "num_passes": lambda n: tyxe.LaplaceOptions(num_passes=n).num_passes,
    "num_points": lambda n: laplace().fit_gp([(X, Y)], num_points=n) or 2,
    "evidence_every": lambda n: len(
        tyxe.LaplaceBNN(net(), PRIOR, LIKELIHOOD).fit([(X, Y)], ADAM, 2, evidence_every=n).loss
    ),
}


@pytest.mark.parametrize("of_library", OF_LIBRARIES)
@pytest.mark.parametrize("name", COUNTS)
def test_integers_of_any_library(name, of_library):
    assert COUNTS[name](of_library(2)) == 2


@pytest.mark.parametrize("bad", [2.0, "2", True, torch.tensor(2.0), torch.ones(2).int()])
@pytest.mark.parametrize("name", COUNTS)
def test_no_integers(name, bad):
    argument = name.split()[0]
    with pytest.raises(TypeError, match=f"^{argument} is .*; expected an integer"):
        COUNTS[name](bad)


def test_the_error_of_a_size_says_which():
    message = r"dataset_size is a Tensor; expected a number, .*: Categorical\(len\(dataset\)\)"
    with pytest.raises(TypeError, match=message):
        Categorical(torch.ones(N))
    likelihood = Categorical(N)
    with pytest.raises(ValueError, match=r"dataset_size is -3.*; expected a number above 0"):
        likelihood.dataset_size = -3
    assert likelihood.dataset_size == N


def test_nothing_is_changed():
    bnn = make()
    message = "num_predictions is 1.5; expected an integer"
    rejects(bnn, TypeError, message, lambda: bnn.predict(X, num_predictions=1.5))
    rejects(bnn, TypeError, message, lambda: bnn.evaluate(X, Y, num_predictions=1.5))
