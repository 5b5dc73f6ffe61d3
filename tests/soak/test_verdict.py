"""The classifier of the fuzz, on made-up outcomes."""

import pytest
import torch
from torch import nn

import tyxe
from tests.soak.verdict import Trial, classify
from tyxe.likelihoods import Categorical


def caught(call) -> BaseException:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any, to be classified
        call()
    return found.value


def in_package(message: str, kind: type[Exception] = ValueError) -> BaseException:
    """Return an error of this message that the package raises by itself."""
    return kind(message).with_traceback(caught(lambda: Categorical(0)).__traceback__)


CLEAR = in_package("num_epochs is 2.5; expected an integer")
# The last frame of Python is in the package, at a call and at no `raise`.
COMPILED = caught(lambda: tyxe.data.concatenated([torch.ones(2), torch.ones(2, 3)], 0))
OWN = caught(lambda: nn.Linear(3, 1)(torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("trial", "kind"),
    [
        (Trial(), "works"),
        (Trial(CLEAR), "clear"),
        (Trial(in_package("the posterior of 'w' is no Normal", TypeError)), "clear"),
        # Of the package, but of no use.
        (Trial(in_package("invalid value")), "obscure"),
        (Trial(in_package("there is no entry of that name", KeyError)), "obscure"),
        (Trial(in_package("mat1 and mat2 do not fit\n Trace Shapes:\n Param Sites:")), "obscure"),
        # Of PyTorch, Pyro and Python.
        (Trial(COMPILED), "obscure"),
        (Trial(OWN), "obscure"),
        (Trial(caught(lambda: tyxe.guides.AutoNormal.nothing)), "obscure"),
        (Trial(ValueError("num_epochs is 2.5; expected an integer")), "obscure"),
        # The plain net says the same of these inputs, or something else.
        (Trial(OWN, own=caught(lambda: nn.Linear(3, 1)(torch.ones(2, 2)))), "net"),
        (Trial(OWN, own=RuntimeError("another message")), "obscure"),
        (Trial(OWN, own=ValueError(str(OWN))), "obscure"),
        # A check has found something, after an error too.
        (Trial(wrong=("a prediction is not finite",)), "silent"),
        (Trial(CLEAR, wrong=("left behind: handlers",)), "silent"),
        (Trial(OWN, wrong=("left behind: plates",), own=OWN), "silent"),
    ],
)
def test_a_trial_is_classified(trial, kind):
    assert classify(trial)[0] == kind


def test_the_reason_names_error_place_and_findings():
    kind, why = classify(Trial(OWN, wrong=("one thing", "another")))
    assert kind == "silent"
    assert why.startswith("one thing; another (after RuntimeError: ")
    assert "[linear.py:" in why
