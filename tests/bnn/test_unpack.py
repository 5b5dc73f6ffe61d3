"""What is given once, to a BNN or its fit, unpacks the batches of all loaders."""

import copy
import pickle
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tyxe.calibration import SplitConformal
from tyxe.diagnostics import diagnose, scores
from tyxe.likelihoods import Categorical

ADAM = partial(torch.optim.Adam, lr=1e-2)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
X, Y = torch.randn(24, 2), torch.arange(24) % 3
RAW = [{"x": x, "y": y} for x, y in zip(X.split(12), Y.split(12), strict=True)]
PAIRS = [(batch["x"], batch["y"]) for batch in RAW]


def unpack(batch):
    return batch["x"], batch["y"]


def variational(**how):
    return tyxe.VariationalBNN(
        nn.Linear(2, 3), PRIOR, Categorical(24), tyxe.guides.AutoNormal, **how
    )


def laplace(**how):
    return tyxe.LaplaceBNN(nn.Linear(2, 3), PRIOR, Categorical(24), **how)


def chains(**how):
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    kernel = partial(tyxe.samplers.HMC, step_size=0.01, num_steps=2, **fixed)
    return tyxe.MCMC_BNN(nn.Linear(2, 3), PRIOR, Categorical(24), kernel, **how)


def swag(**how):
    return tyxe.SWAG_BNN(nn.Linear(2, 3), PRIOR, Categorical(24), rank=2, **how)


def dropout(**how):
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3))
    return tyxe.DropoutBNN(net, Categorical(24), **how)


def ensemble(**how):
    return tyxe.EnsembleBNN(lambda _: variational(**how), 2)


MAKE = {make.__name__: make for make in (variational, laplace, chains, swag, dropout, ensemble)}


def fit(bnn, **how):
    if isinstance(bnn, tyxe.MCMC_BNN):
        return bnn.fit(RAW, 4, warmup_steps=1, progress=False, **how)
    return bnn.fit(RAW, ADAM, 8, validation=RAW, restore_best=False, **how)


def used(bnn):
    """Assert that loaders of raw batches and of none are taken everywhere."""
    torch.manual_seed(0)
    probs = bnn.predict(RAW, num_predictions=4)
    assert probs.shape == (24, 3)
    torch.manual_seed(0)
    assert torch.equal(bnn.predict(RAW, num_predictions=4, unpack=unpack), probs)
    error, _ = bnn.evaluate(RAW, num_predictions=4, reduction="mean")
    assert 0 <= error <= 1
    assert bnn.evaluate(X, Y, num_predictions=4)[0].shape == ()
    as_it_is = lambda batch: batch  # noqa: E731
    assert bnn.predict(PAIRS, num_predictions=4, unpack=as_it_is).shape == (24, 3)
    assert scores(bnn, RAW, num_predictions=4)["error"] >= 0
    sets = SplitConformal(level=0.8).wrap(bnn, RAW, num_predictions=4)
    assert sets.predict(X).shape == (24, 3)
    bnn.update_norm_statistics(RAW)


@pytest.mark.parametrize("name", MAKE)
def test_what_a_fit_was_given_holds_for_all_loaders(name):
    bnn = MAKE[name]()
    fit(bnn, unpack=unpack)
    used(bnn)
    fit(bnn)


@pytest.mark.parametrize("name", MAKE)
def test_what_the_constructor_was_given_holds_for_all_loaders(name):
    bnn = MAKE[name](unpack=unpack)
    fit(bnn)
    used(bnn)
    used(copy.deepcopy(bnn))


def turned(batch):
    """Unpack pairs of targets and inputs, which are pairs again that have to be left alone."""
    assert not batch[0].is_floating_point()
    return batch[1], batch[0]


TURNED = [(y, x) for x, y in PAIRS]


@pytest.mark.parametrize("loader", [TURNED, DataLoader(TURNED, None)], ids=["list", "DataLoader"])
def test_no_batch_is_unpacked_twice(loader):
    members = ensemble()
    members.fit(TURNED, ADAM, 1, unpack=turned)
    assert members.predictive(loader, num_predictions=2).probs.shape == (24, 3)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))
    kernel = partial(tyxe.samplers.SGLD, lr=1e-3)
    by_batches = tyxe.MCMC_BNN(net, PRIOR, Categorical(24), kernel)
    by_batches.fit(loader, 2, warmup_steps=1, unpack=turned)
    assert by_batches.predict(X, num_predictions=2).shape == (24, 3)
    averaged = tyxe.SWAG_BNN(net, PRIOR, Categorical(24), rank=2)
    averaged.fit(loader, ADAM, 8, unpack=turned)
    assert averaged.predict(loader, num_predictions=2).shape == (24, 3)
    assert scores(members, loader, num_predictions=2)["error"] >= 0
    assert "error" in str(diagnose(averaged, loader, loader, num_predictions=2))


def test_laplace_and_diagnosis_take_it():
    bnn = laplace(unpack=unpack)
    bnn.fit(RAW, ADAM, 2)
    bnn.fit_curvature(RAW)
    bnn.optimize_prior_precision("grid", RAW, grid=[0.5, 2.0])
    bnn.fit_gp(RAW)
    assert bnn.refine(RAW).predict(X, num_predictions=4).shape == (24, 3)
    assert "error" in str(diagnose(bnn, RAW, RAW, num_predictions=4))


def test_a_stacked_fit_takes_it():
    bnn = ensemble()
    bnn.fit(RAW, ADAM, 2, vectorize=True, unpack=unpack, validation=RAW)
    used(bnn)


def test_a_copy_does_not_know_what_a_fit_was_given_and_can_be_pickled():
    bnn = variational()
    bnn.fit(RAW, ADAM, 1, unpack=lambda batch: (batch["x"], batch["y"]))
    again = pickle.loads(pickle.dumps(bnn))
    with pytest.raises(ValueError, match="the loader yields no targets"):
        again.evaluate(RAW)


def test_batches_of_another_kind_are_left_as_they_are():
    bnn = variational()
    bnn.fit(RAW, ADAM, 1, unpack=unpack)
    assert bnn.predict(PAIRS, num_predictions=4).shape == (24, 3)
    bnn.fit(PAIRS, ADAM, 1)
    triples = [(x, torch.zeros(12), y) for x, y in PAIRS]
    swapped = variational(unpack=lambda batch: (batch[0], batch[2]))
    swapped.fit(triples, ADAM, 1)
    error, _ = swapped.evaluate(triples, num_predictions=0)
    assert error == swapped.evaluate(PAIRS, num_predictions=0)[0]


def test_batches_that_it_does_not_fit():
    bnn = variational(unpack=unpack)
    with pytest.raises(ValueError, match=r"holds for all loaders, and fails on a tuple.*=lambda"):
        bnn.evaluate(PAIRS)
    bnn.fit(RAW, ADAM, 1)
    with pytest.raises(ValueError, match="fails on a dict of this one: KeyError: 'x'"):
        bnn.evaluate([{"z": X, "y": Y}])
    with pytest.raises(TypeError, match="unpack is 3; expected a function"):
        variational(unpack=3)
