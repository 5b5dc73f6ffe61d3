"""A slice of the fuzz, how outcomes are classified, and that faults are found."""

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.soak import fuzz
from tests.soak.verdict import KINDS, Trial, classify
from tyxe.data import concatenated
from tyxe.likelihoods import Categorical

SEED = 0


def _caught(call) -> BaseException:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any, to be classified
        call()
    return found.value


def test_a_slice_has_nothing_silent_and_nothing_obscure():
    found = fuzz.run(60, SEED)
    assert found["found"] == []
    assert sum(found[kind] for kind in KINDS) == found["combinations"] == 60
    assert found["works"] >= 30
    assert found["clear"] >= 5


CLEAR = "num_epochs is 2.5; expected an integer"
REFUSED = _caught(lambda: Categorical(0))
OWN = _caught(lambda: nn.Linear(3, 1)(torch.ones(2, 2)))


def _said(message, error=ValueError):
    """Return an error of this message that the package raises by itself."""
    return error(message).with_traceback(REFUSED.__traceback__)


@pytest.mark.parametrize(
    ("trial", "kind"),
    [
        (Trial(), "works"),
        (Trial(_said(CLEAR)), "clear"),
        (Trial(_said("invalid value")), "obscure"),
        (Trial(_said("there is no entry of that name", KeyError)), "obscure"),
        # Of others: without a line of the package, and from compiled code that it calls.
        (Trial(ValueError(CLEAR)), "obscure"),
        (Trial(_caught(lambda: concatenated([torch.ones(2), torch.ones(2, 3)], 0))), "obscure"),
        # A check has found something, after an error too.
        (Trial(OWN, wrong=("left behind: plates",)), "silent"),
    ],
)
def test_a_trial_is_classified(trial, kind):
    assert classify(trial)[0] == kind


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
    is_variational = fuzz.Choices(SEED, index).wrapper == "VariationalBNN"
    return is_variational and classify(fuzz.attempt(SEED, index)[1])[0] == "works"


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
