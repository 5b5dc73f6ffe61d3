"""Outputs are picked from what a net returns, and batches are unpacked as they come."""

import copy
import pickle
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tests.oracles.bnns import ADAM, KINDS, NORMAL, mean_field, mlp
from tests.oracles.predictions import seeded
from tyxe.calibration import SplitConformal
from tyxe.diagnostics import diagnose, scores
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

X, Y = torch.randn(24, 2), torch.arange(24) % 3
RAW = [{"x": x, "y": y} for x, y in zip(X.split(12), Y.split(12), strict=True)]
PAIRS = [(batch["x"], batch["y"]) for batch in RAW]


def unpack(batch):
    return batch["x"], batch["y"]


def make(kind="mean_field", net=None, **how):
    return KINDS[kind](net or nn.Linear(2, 3), Categorical(24), **how)


def fit(bnn, loader=RAW, **how):
    if isinstance(bnn, tyxe.MCMC_BNN):
        return bnn.fit(loader, 4, warmup_steps=1, progress=False, **how)
    return bnn.fit(loader, ADAM, 8, validation=loader, restore_best=False, **how)


def used(bnn):
    """Assert that loaders of raw batches and of none are taken everywhere."""
    predict = partial(bnn.predict, num_predictions=4)
    probs = seeded(predict, RAW)
    assert probs.shape == (24, 3)
    assert torch.equal(seeded(predict, RAW, unpack=unpack), probs)
    assert predict(PAIRS, unpack=lambda batch: batch).shape == (24, 3)
    draw = partial(bnn.sample_predictive, num_samples=4)
    drawn = seeded(draw, RAW)
    assert drawn.shape == (4, 24)
    assert torch.equal(seeded(draw, RAW, unpack=unpack), drawn)
    assert draw(PAIRS, unpack=lambda batch: batch).shape == (4, 24)
    assert seeded(bnn.predictive, RAW).batch_shape == (24,)
    error, _ = bnn.evaluate(RAW, num_predictions=4, reduction="mean")
    assert 0 <= error <= 1
    assert bnn.evaluate(X, Y, num_predictions=4)[0].shape == ()
    assert scores(bnn, RAW, num_predictions=4)["error"] >= 0
    sets = SplitConformal(level=0.8).wrap(bnn, RAW, num_predictions=4)
    assert sets.predict(X).shape == (24, 3)
    bnn.update_norm_statistics(RAW)


@pytest.mark.parametrize(
    ("name", "how"), [*((name, {}) for name in KINDS), ("ensemble", {"vectorize": True})]
)
def test_what_a_fit_was_given_holds_for_all_loaders(name, how):
    bnn = make(name)
    fit(bnn, unpack=unpack, **how)
    used(bnn)
    fit(bnn)


@pytest.mark.parametrize("name", KINDS)
def test_what_the_constructor_was_given_holds_for_all_loaders(name):
    bnn = make(name, unpack=unpack)
    fit(bnn)
    used(bnn)
    used(copy.deepcopy(bnn))


def test_intervals_take_the_same_loaders():
    numbers = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.1)
    bnn = mean_field(nn.Linear(2, 1), numbers, unpack=unpack)
    lower, upper = seeded(bnn.interval, RAW)
    again = seeded(bnn.interval, PAIRS, unpack=lambda batch: batch)
    torch.testing.assert_close((lower, upper), again)
    assert bool((lower < upper).all())


def turned(batch):
    """Unpack pairs of targets and inputs, which are pairs again that have to be left alone."""
    assert not batch[0].is_floating_point()
    return batch[1], batch[0]


TURNED = [(y, x) for x, y in PAIRS]


@pytest.mark.parametrize("loader", [TURNED, DataLoader(TURNED, None)], ids=["list", "DataLoader"])
def test_no_batch_is_unpacked_twice(loader):
    parts = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)), NORMAL, Categorical(24)
    members, chain = make("ensemble"), tyxe.MCMC_BNN(*parts, tyxe.samplers.SGLD(1e-3))
    averaged = tyxe.SWAG_BNN(*parts, rank=2)
    members.fit(TURNED, ADAM, 1, unpack=turned)
    chain.fit(loader, 2, warmup_steps=1, unpack=turned)
    averaged.fit(loader, ADAM, 8, unpack=turned)
    assert members.predictive(loader, num_predictions=2).probs.shape == (24, 3)
    assert chain.predict(X, num_predictions=2).shape == (24, 3)
    assert averaged.predict(loader, num_predictions=2).shape == (24, 3)
    assert scores(members, loader, num_predictions=2)["error"] >= 0
    assert "error" in str(diagnose(averaged, loader, loader, num_predictions=2))


def test_laplace_and_diagnosis_take_it():
    bnn = make("laplace", unpack=unpack)
    bnn.fit(RAW, ADAM, 2)
    bnn.fit_curvature(RAW)
    bnn.optimize_prior_precision("grid", RAW, grid=[0.5, 2.0])
    bnn.fit_gp(RAW)
    assert bnn.refine(RAW).predict(X, num_predictions=4).shape == (24, 3)
    assert "error" in str(diagnose(bnn, RAW, RAW, num_predictions=4))
    net = nn.Linear(2, 3)
    one, other = (make("laplace", net) for _ in range(2))
    one.fit_curvature(RAW, unpack=unpack)
    other.fit_curvature(PAIRS)
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood())


def test_a_copy_does_not_know_what_a_fit_was_given_and_can_be_pickled():
    bnn = make()
    bnn.fit(RAW, ADAM, 1, unpack=lambda batch: (batch["x"], batch["y"]))
    again = pickle.loads(pickle.dumps(bnn))
    with pytest.raises(ValueError, match="the loader yields no targets"):
        again.evaluate(RAW)


def test_batches_of_another_kind_are_left_as_they_are():
    bnn = make()
    bnn.fit(RAW, ADAM, 1, unpack=unpack)
    assert bnn.predict(PAIRS, num_predictions=4).shape == (24, 3)
    bnn.fit(PAIRS, ADAM, 1)
    triples = [(x, torch.zeros(12), y) for x, y in PAIRS]
    swapped = make(unpack=lambda batch: (batch[0], batch[2]))
    swapped.fit(triples, ADAM, 1)
    error, _ = swapped.evaluate(triples, num_predictions=0)
    assert error == swapped.evaluate(PAIRS, num_predictions=0)[0]


def test_batches_that_it_does_not_fit():
    bnn = make(unpack=unpack)
    with pytest.raises(ValueError, match=r"holds for all loaders, and fails on a tuple.*=lambda"):
        bnn.evaluate(PAIRS)
    bnn.fit(RAW, ADAM, 1)
    with pytest.raises(ValueError, match="fails on a dict of this one: KeyError: 'x'"):
        bnn.evaluate([{"z": X, "y": Y}])
    for call in (partial(make, unpack=3), partial(bnn.fit, [{}], ADAM, 1, unpack=3)):
        with pytest.raises(TypeError, match="unpack is 3; expected a function"):
            call()
    with pytest.raises(TypeError, match="unpack goes with a loader"):
        bnn.predict(X, unpack=unpack)


def test_workers_of_an_unpacked_loader_start_anew_for_each_chain():
    items = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    loader = DataLoader(items, 4, shuffle=True, num_workers=1, persistent_workers=True)
    bnn = tyxe.MCMC_BNN(nn.Linear(2, 3), NORMAL, Categorical(24), tyxe.samplers.SGLD(1e-3))
    bnn.fit(loader, 4, num_chains=2, unpack=unpack)
    assert bnn.predict(X, num_predictions=4).shape == (24, 3)


class OfList(nn.Linear):
    """A net of one argument, a list."""

    def forward(self, parts):
        return super().forward(torch.cat(parts, 1))


def test_a_net_of_one_list_gets_a_tuple_of_it():
    bnn = tyxe.LaplaceBNN(OfList(3, 1), NORMAL, HomoskedasticGaussian(24, scale=0.5))
    parts, y = [X, X[:, :1]], X[:, 1:]
    with pytest.raises(TypeError, match=r"gets a tuple of it, unpack=lambda batch: \(\(batch\[0\]"):
        bnn.fit_curvature([(parts, y)])
    bnn.fit_curvature([(parts, y)], unpack=lambda batch: ((batch[0],), batch[1]))
    assert bnn.predict((parts,))[0].shape == (24, 1)


# --------------------------------------------------------------------------- outputs


class Found(NamedTuple):
    """What a net returns: a loss, and logits."""

    loss: None
    logits: torch.Tensor


class Structured(nn.Module):
    """A net that returns its logits within something."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp(2, 5, 3)
        self.kind = kind

    def forward(self, x):
        logits = self.inner(x)
        if self.kind == "dict":
            return {"loss": None, "logits": logits}
        return {"tuple": (None, logits), "named": Found(None, logits), "plain": logits}[self.kind]


def second(found):
    return found[1]


OUTPUTS = {
    "key": ("dict", "logits"),
    "name": ("named", "logits"),
    "index": ("tuple", 1),
    "function": ("tuple", second),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "key") for name in KINDS] + [("mean_field", k) for k in OUTPUTS if k != "key"],
)
def test_outputs_and_batches_as_they_come_are_those_of_plain_ones(name, kind):
    returns, output = OUTPUTS[kind]
    found = []
    for net, options, loader in (
        (Structured("plain"), {}, PAIRS),
        (Structured(returns), {"output": output, "unpack": unpack}, RAW),
    ):
        torch.manual_seed(1)
        bnn = make(name, net, **options)
        fit(bnn, loader)
        torch.manual_seed(2)
        found.append([bnn.evaluate(loader, num_predictions=3), bnn.predict(loader)])
        found[-1].append(bnn(X) if name == "dropout" else bnn.to_ensemble(2)(X))
    torch.testing.assert_close(found[0], found[1])


def test_a_plain_net_returns_what_it_did_and_copies_keep_the_output():
    bnn = make("mean_field", Structured("dict"), output="logits")
    assert set(bnn.to_module()(X)) == {"loss", "logits"}
    assert bnn(X).shape == (24, 3)
    for copied in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert copied.predict(X).shape == (24, 3)
    module = tyxe.PytorchBNN(Structured("dict"), NORMAL, tyxe.guides.AutoNormal, output="logits")
    assert module(X).shape == (24, 3)


@pytest.mark.parametrize(
    ("kind", "output", "returns"),
    [
        ("dict", "probs", "dict of loss, logits"),
        ("named", "probs", "Found of loss, logits"),
        ("tuple", 2, "tuple"),
        ("plain", "logits", "Tensor"),
    ],
)
def test_an_output_that_there_is_not(kind, output, returns):
    message = f"output={output!r}, but Structured returns a {returns}"
    with pytest.raises(ValueError, match=message):
        make("mean_field", Structured(kind), output=output).predict(X)


def test_what_is_wrong_names_the_argument_that_mends_it():
    with pytest.raises(TypeError, match=r"output is 1\.5"):
        make("mean_field", Structured("dict"), output=1.5)
    with pytest.raises(TypeError, match=r"returns a dict.*output="):
        make("mean_field", Structured("dict")).fit(PAIRS, ADAM, 1)
    with pytest.raises(ValueError, match=r"a mapping with keys x, y.*unpack="):
        make().fit(RAW, ADAM, 1)
