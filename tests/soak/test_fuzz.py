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


# What a fault makes of the result of a method, or does before or after it.
def _moved(bnn, found, count=iter(range(100))):  # noqa: B008 - counts all calls
    shift = torch.tensor(float(next(count)))
    return tuple(f + shift for f in found) if isinstance(found, tuple) else found + shift


def _nan(bnn, found):
    return _moved(bnn, found, iter([torch.nan]))


def _draws_left(bnn, found):
    for tensor in bnn._in_places().values():
        tensor.data.add_(1.0)
    return found


def _other_mode(bnn, found):
    bnn.net.training = not bnn.net.training
    return found


def _plate_left(bnn, found):
    pyro.poutine.runtime._DIM_ALLOCATOR.allocate("forgotten", -3)
    return found


FAULTS = {
    "one seed, two predictions": ("predict", _moved, "the same BNN predicts something else"),
    "NaN": ("predict", _nan, "is not finite"),
    "a draw in the net": ("fit", _draws_left, "is not as it was"),
    "another mode": ("fit", _other_mode, "a module has another mode"),
    "a plate": ("fit", _plate_left, "left behind: plates"),
}


def _works(index):
    choices = fuzz.Choices(SEED, index)
    is_plain = choices.wrapper == "VariationalBNN" and choices.odd is None
    return is_plain and classify(fuzz.attempt(SEED, index)[1])[0] == "works"


@pytest.fixture(scope="module")
def working():
    """A combination that works."""
    return next(index for index in range(20) if _works(index))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_silent(fault, working, monkeypatch):
    name, change, message = FAULTS[fault]
    method = getattr(tyxe.VariationalBNN, name)
    monkeypatch.setattr(
        tyxe.VariationalBNN,
        name,
        lambda bnn, *args, **options: change(bnn, method(bnn, *args, **options)),
    )
    try:
        kind, why = classify(fuzz.attempt(SEED, working)[1])
    finally:
        allocator = pyro.poutine.runtime._DIM_ALLOCATOR
        if any(frame is not None for frame in allocator._stack):
            allocator.free("forgotten", -3)
    assert kind == "silent"
    assert message in why
