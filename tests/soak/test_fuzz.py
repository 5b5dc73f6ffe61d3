"""A slice of the fuzz, and that what it finds can be found again."""

import pyro
import pytest
import torch

import tyxe
from tests.soak import fuzz
from tests.soak.verdict import KINDS, classify

SEED = 0


def test_a_slice_has_nothing_silent_and_nothing_obscure():
    found = fuzz.run(60, SEED)
    assert found["found"] == []
    assert sum(found[kind] for kind in KINDS) == found["combinations"] == 60
    assert found["works"] >= 15
    assert found["clear"] >= 15


def test_a_combination_is_the_same_when_it_is_reproduced():
    first, second = (fuzz.attempt(SEED, 3) for _ in range(2))
    assert first[0] == second[0]
    assert classify(first[1]) == classify(second[1])
    assert fuzz.attempt(SEED, 4)[0] != first[0]


def session(monkeypatch, change):
    """Try a combination that works, with a fault in the library, and return what is found."""
    index = next(i for i in range(20) if works(i))
    change(monkeypatch)
    return classify(fuzz.attempt(SEED, index)[1])


def works(index):
    choices = fuzz.Choices(SEED, index)
    return (
        choices.wrapper == "VariationalBNN"
        and choices.odd is None
        and classify(fuzz.attempt(SEED, index)[1])[0] == "works"
    )


def other_predictions(monkeypatch):
    predict = tyxe.VariationalBNN.predict

    def noisy(self, *args, **options):
        torch.rand(1).item()
        found = predict(self, *args, **options)
        shift = torch.tensor(next(counter))
        return tuple(f + shift for f in found) if isinstance(found, tuple) else found + shift

    counter = iter(float(i) for i in range(100))
    monkeypatch.setattr(tyxe.VariationalBNN, "predict", noisy)


def nan(monkeypatch):
    predict = tyxe.VariationalBNN.predict

    def not_finite(self, *args, **options):
        found = predict(self, *args, **options)
        return (
            tuple(f * torch.nan for f in found) if isinstance(found, tuple) else found * torch.nan
        )

    monkeypatch.setattr(tyxe.VariationalBNN, "predict", not_finite)


def draws_left(monkeypatch):
    fit = tyxe.VariationalBNN.fit

    def leaving(self, *args, **options):
        history = fit(self, *args, **options)
        for tensor in self.in_places().values():
            tensor.data.add_(1.0)
        return history

    monkeypatch.setattr(tyxe.VariationalBNN, "fit", leaving)


def train_mode(monkeypatch):
    fit = tyxe.VariationalBNN.fit

    def leaving(self, *args, **options):
        history = fit(self, *args, **options)
        part = next(self.net.modules())
        part.training = not part.training
        return history

    monkeypatch.setattr(tyxe.VariationalBNN, "fit", leaving)


def handler_left(monkeypatch):
    fit = tyxe.VariationalBNN.fit

    def leaving(self, *args, **options):
        pyro.poutine.runtime._DIM_ALLOCATOR.allocate("forgotten", -3)
        return fit(self, *args, **options)

    monkeypatch.setattr(tyxe.VariationalBNN, "fit", leaving)


FAULTS = {
    "one seed, two predictions": (other_predictions, "the same BNN predicts something else"),
    "NaN": (nan, "is not finite"),
    "a draw in the net": (draws_left, "is not as it was"),
    "another mode": (train_mode, "a module has another mode"),
    "a plate": (handler_left, "left behind: plates"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_silent(fault, monkeypatch):
    change, message = FAULTS[fault]
    try:
        kind, why = session(monkeypatch, change)
    finally:
        allocator = pyro.poutine.runtime._DIM_ALLOCATOR
        if any(frame is not None for frame in allocator._stack):
            allocator.free("forgotten", -3)
    assert kind == "silent"
    assert message in why
