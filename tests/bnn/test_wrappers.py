"""The contract of wrappers, for the package's own, and wrappers that break it."""

import pytest
from torch import nn

import tyxe
from tests.contracts.wrappers import TRAINING, WRAPPERS, check_wrapper

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_packages_own(name: str) -> None:
    check_wrapper(WRAPPERS[name], train=TRAINING.get(name))


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
