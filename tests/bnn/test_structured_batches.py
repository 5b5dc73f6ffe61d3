"""Outputs are picked from what a net returns, and batches are unpacked as they come."""

import copy
import functools
import pickle
from typing import NamedTuple

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tyxe.data import Unpacked

X, Y = torch.linspace(-1, 1, 24).view(8, 3), torch.arange(8) % 2


class Found(NamedTuple):
    """What a net returns: a loss, and logits."""

    loss: None
    logits: torch.Tensor


class Structured(nn.Module):
    """A net that returns its logits within something."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
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


def prior():
    return tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def swag(net, likelihood, **options):
    return tyxe.SWAG_BNN(net, prior(), likelihood, rank=2, **options)


def variational(net, likelihood, **options):
    return tyxe.VariationalBNN(net, prior(), likelihood, tyxe.guides.AutoNormal, **options)


def ensemble(net, likelihood, **options):
    def member(index):
        own = copy.deepcopy(net)
        torch.manual_seed(index)
        return variational(tyxe.util.reset_parameters_(own), likelihood, **options)

    return tyxe.EnsembleBNN(member, 2)


ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
WRAPPERS = {
    "variational": (variational, (ADAM, 3)),
    "laplace": (lambda net, given, **o: tyxe.LaplaceBNN(net, prior(), given, **o), (ADAM, 3)),
    "mcmc": (
        lambda net, given, **o: tyxe.MCMC_BNN(
            net, prior(), given, functools.partial(tyxe.samplers.SGLD, lr=1e-3), **o
        ),
        (3,),
    ),
    "swag": (swag, (ADAM, 8)),
    "dropout": (
        lambda net, given, **o: tyxe.DropoutBNN(nn.Sequential(net, nn.Identity()), given, **o),
        (ADAM, 3),
    ),
    "ensemble": (ensemble, (ADAM, 3)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "key") for name in WRAPPERS if name != "dropout"]
    + [("variational", kind) for kind in OUTPUTS if kind != "key"],
)
def test_outputs_and_batches_as_they_come_are_those_of_plain_ones(name, kind):
    make, arguments = WRAPPERS[name]
    returns, output = OUTPUTS[kind]
    found = []
    for net, options, loader, unpack in (
        (Structured("plain"), {}, [(X, Y)], None),
        (
            Structured(returns),
            {"output": output},
            [{"x": X, "label": Y}],
            lambda batch: (batch["x"], batch["label"]),
        ),
    ):
        torch.manual_seed(1)
        bnn = make(net, tyxe.likelihoods.Categorical(8), **options)
        bnn.fit(loader, *arguments, unpack=unpack)
        torch.manual_seed(2)
        found.append(
            (
                bnn.evaluate(loader, num_predictions=3, unpack=unpack),
                bnn.predict(loader, num_predictions=3, unpack=unpack),
                bnn.to_ensemble(2)(X),
            )
        )
    torch.testing.assert_close(found[0], found[1])


def test_a_curvature_takes_batches_as_they_come():
    found = []
    for loader, unpack in (([(X, Y)], None), ([{"x": X, "y": Y}], lambda b: (b["x"], b["y"]))):
        bnn = tyxe.LaplaceBNN(Structured("plain"), prior(), tyxe.likelihoods.Categorical(8))
        bnn.fit_curvature(loader, unpack=unpack)
        found.append(bnn.state.precision().to_dense())
    torch.testing.assert_close(found[0], found[1])


def test_dropout_takes_an_output():
    net = nn.Sequential(nn.Dropout(0.5), Structured("dict"))
    bnn = tyxe.DropoutBNN(net, tyxe.likelihoods.Categorical(8), output="logits")
    assert bnn.predict(X, num_predictions=4).shape == (8, 2)


def test_a_plain_net_returns_what_it_did_and_copies_keep_the_output():
    bnn = variational(Structured("dict"), tyxe.likelihoods.Categorical(8), output="logits")
    assert set(bnn.to_module()(X)) == {"loss", "logits"}
    assert bnn(X).shape == (8, 2)
    for copied in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        assert copied.predict(X).shape == (8, 2)


def test_module_bnns_take_an_output():
    bnn = tyxe.PytorchBNN(Structured("dict"), prior(), tyxe.guides.AutoNormal, output="logits")
    assert bnn(X).shape == (8, 2)


@pytest.mark.parametrize(
    ("kind", "output", "message"),
    [
        ("dict", "probs", r"output='probs', but Structured returns a dict of loss, logits"),
        ("named", "probs", r"output='probs', but Structured returns a Found of loss, logits"),
        ("tuple", 2, r"output=2, but Structured returns a tuple"),
        ("plain", "logits", r"output='logits', but Structured returns a Tensor"),
    ],
)
def test_an_output_that_there_is_not(kind, output, message):
    bnn = variational(Structured(kind), tyxe.likelihoods.Categorical(8), output=output)
    with pytest.raises(ValueError, match=message):
        bnn.predict(X)


def test_an_output_or_unpack_of_a_wrong_type():
    likelihood = tyxe.likelihoods.Categorical(8)
    with pytest.raises(TypeError, match=r"output is 1\.5"):
        variational(Structured("dict"), likelihood, output=1.5)
    bnn = variational(Structured("dict"), likelihood, output="logits")
    with pytest.raises(TypeError, match="unpack is 3; expected a function"):
        bnn.fit([{}], ADAM, 1, unpack=3)
    with pytest.raises(TypeError, match="unpack goes with a loader"):
        bnn.predict(X, unpack=lambda batch: batch)


def test_what_is_wrong_names_the_argument_that_mends_it():
    bnn = variational(Structured("dict"), tyxe.likelihoods.Categorical(8))
    with pytest.raises(TypeError, match=r"returns a dict.*output="):
        bnn.fit([(X, Y)], ADAM, 1)
    bnn = variational(Structured("plain"), tyxe.likelihoods.Categorical(8))
    with pytest.raises(ValueError, match=r"a mapping with keys x, y.*unpack="):
        bnn.fit([{"x": X, "y": Y}], ADAM, 1)


def test_workers_of_an_unpacked_loader_start_anew_for_each_chain():
    items = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    loader = DataLoader(items, 4, shuffle=True, num_workers=1, persistent_workers=True)
    make, _ = WRAPPERS["mcmc"]
    bnn = make(Structured("plain"), tyxe.likelihoods.Categorical(8))
    bnn.fit(loader, 4, num_chains=2, unpack=lambda batch: (batch["x"], batch["y"]))
    assert bnn.predict(X, num_predictions=4).shape == (8, 2)


def test_an_unpacked_loader_serves_methods_without_the_argument():
    loader = Unpacked([{"x": X, "y": Y}], lambda batch: (batch["x"], batch["y"]))
    bnn = tyxe.LaplaceBNN(Structured("plain"), prior(), tyxe.likelihoods.Categorical(8))
    bnn.fit_curvature(loader)
    precision = bnn.optimize_prior_precision("grid", loader, grid=[0.1, 1.0, 10.0])
    assert float(precision) in (0.10000000149011612, 1.0, 10.0)


class OfList(nn.Module):
    """A net of one argument, a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, parts):
        return self.layer(torch.cat(parts, 1))


def test_a_net_of_one_list_gets_a_tuple_of_it():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.5)
    bnn = tyxe.LaplaceBNN(OfList(), tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood)
    parts, y = [torch.randn(8, 2), torch.randn(8, 1)], torch.randn(8, 1)
    with pytest.raises(TypeError, match=r"gets a tuple of it, unpack=lambda batch: \(\(batch\[0\]"):
        bnn.fit_curvature([(parts, y)])
    bnn.fit_curvature([(parts, y)], unpack=lambda batch: ((batch[0],), batch[1]))
    assert bnn.predict((parts,))[0].shape == (8, 1)
