"""The contract of wrappers, for the package's own and for broken ones, and their default draws."""

import functools

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.contracts.wrappers import TRAINING, WRAPPERS, check_wrapper
from tests.oracles.bnns import NORMAL
from tests.oracles.predictions import seeded

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_packages_own(name: str) -> None:
    check_wrapper(WRAPPERS[name], train=TRAINING.get(name))


PARTS = {"net", "prior", "likelihood", "net_prior", "net_guide", "likelihood_guide", "optimizer"}
SHOWN = [
    WRAPPERS[name] for name in ("mean field", "Laplace", "SGLD", "SWAG", "dropout", "ensemble")
]
SHOWN += [lambda: tyxe.PytorchBNN(nn.Linear(1, 1), NORMAL, tyxe.guides.AutoNormal)]


@pytest.mark.parametrize("make", SHOWN)
def test_tab_completion_shows_few_names(make) -> None:
    own = {name for name in dir(make()) if not name.startswith("_")}
    own -= PARTS | set(dir(nn.Module()))
    assert len(own) <= 26, sorted(own)


class TrainsNoMore(tyxe.VariationalBNN):
    def predict(self, *inputs, **options):
        found = super().predict(*inputs, **options)
        self.eval()
        return found


class Elsewhere(tyxe.VariationalBNN):
    def to_module(self, sample=False):
        return nn.Linear(2, 3)


class Drawn(tyxe.VariationalBNN):
    def _mean_values(self):
        return self._one_draw()


class Forgets(tyxe.VariationalBNN):
    def load_checkpoint(self, checkpoint):
        self.load_state_dict(checkpoint["bnn"])


BROKEN = [
    (TrainsNoMore, "predict changes modes"),
    (Elsewhere, "to_module is not at the centre"),
    (Drawn, "the centre is random"),
    (Forgets, "a loaded training differs in"),
]


@pytest.mark.parametrize(("kind", "message"), BROKEN)
def test_what_breaks_it_is_named(kind, message) -> None:
    def make():
        bnn = WRAPPERS["mean field"]()
        bnn.__class__ = kind
        return bnn

    train = TRAINING["mean field"] if kind is Forgets else None
    with pytest.raises(AssertionError, match=message):
        check_wrapper(make, train=train)


# --- draws by default -----------------------------------------------------------------------------


# Chains are as short as tests are.
X = torch.linspace(-1, 1, 24).view(12, 2)
Y = torch.arange(12) % 3
DRAWS = {
    "maximum likelihood": 1,
    "MAP": 1,
    "mean field": 32,
    "low rank": 32,
    "Laplace": 32,
    "IVON": 32,
    "HMC": 12,  # two chains of six samples
    "NUTS": 12,
    "MCLMC": 12,
    "SGLD": 6,
    "SGHMC": 6,
    "SWAG": 32,
    "dropout": 32,
    "ensemble": 64,  # 32 of each member
    "ensemble in one tensor": 64,
    "Multi-SWAG": 64,
}


def assert_is_default(call, *arguments, **options):
    told = seeded(call, *arguments, **options)
    torch.testing.assert_close(seeded(call, *arguments), told, rtol=0, atol=0)


def test_every_wrapper_is_in_the_table():
    assert DRAWS.keys() == WRAPPERS.keys()


@pytest.mark.parametrize("name", DRAWS)
def test_default_of_every_wrapper(name):
    torch.manual_seed(0)
    bnn = WRAPPERS[name]()
    assert len(bnn.predict(X, aggregate=False)) == DRAWS[name]
    each = DRAWS[name] // (len(bnn.members) if isinstance(bnn, tyxe.EnsembleBNN) else 1)
    assert_is_default(bnn.predict, X, num_predictions=each)
    assert_is_default(bnn.evaluate, X, Y, num_predictions=each)
    if name != "dropout":
        members = bnn.to_ensemble().modules()
        assert sum(isinstance(part, nn.Tanh) for part in members) == DRAWS[name]


def variational(index=0, guide=tyxe.guides.AutoNormal):
    return tyxe.VariationalBNN(nn.Linear(2, 3), NORMAL, tyxe.likelihoods.Categorical(12), guide)


def test_an_ensemble_of_plain_nets_has_its_members_once():
    ensemble = tyxe.EnsembleBNN(functools.partial(variational, guide=AutoDelta), 5)
    assert len(ensemble.predict(X, aggregate=False)) == 5
    assert len(ensemble.to_ensemble().parts) == 5


def test_members_of_two_kinds_have_as_many_draws_each():
    ensemble = tyxe.EnsembleBNN(lambda i: variational(i, [AutoDelta, tyxe.guides.AutoNormal][i]), 2)
    draws = ensemble.predict(X, aggregate=False)
    assert len(draws) == 64
    torch.testing.assert_close(draws[0], draws[31], rtol=0, atol=0)
    assert not torch.equal(draws[32], draws[63])


def test_gaussian_outputs_of_classes_have_a_hundred_samples():
    bnn = WRAPPERS["Laplace"]()
    predict = functools.partial(bnn.predict, link="mc")
    assert_is_default(predict, X, num_predictions=100)


def test_a_noise_with_a_spread_counts():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(12, scale=dist.LogNormal(0.0, 1.0))
    parts = nn.Linear(2, 1), NORMAL, likelihood, AutoDelta
    bnn = tyxe.VariationalBNN(*parts, tyxe.guides.AutoNormal)
    assert_is_default(bnn.predict, X, num_predictions=32)
    bnn = tyxe.VariationalBNN(*parts, AutoDelta)
    assert len(bnn.predict(X, aggregate=False)) == 1


@pytest.mark.parametrize(("guide", "count"), [(tyxe.guides.AutoNormal, 32), (AutoDelta, 1)])
def test_layers_of_bigger_nets(guide, count):
    bnn = tyxe.PytorchBNN(nn.Linear(2, 3), NORMAL, guide)
    assert bnn.predict(X).shape == (count, 12, 3)
    assert bnn.to_ensemble()(X).shape == (count, 12, 3)
