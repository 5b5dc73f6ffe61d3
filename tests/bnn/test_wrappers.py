"""The contract of wrappers, for the package's own, and wrappers that break it."""

import pytest
from torch import nn

import tyxe
from tests.contracts.wrappers import TRAINING, WRAPPERS, check_wrapper
from tests.oracles.bnns import NORMAL

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
