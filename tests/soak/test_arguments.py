"""What counts as an obscure error, and that a bad argument is tried."""

import pytest
import torch

from tests.soak.arguments import BAD, Call, attempt, is_obscure
from tyxe import check
from tyxe.metrics import nll


def error_of(function):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        function()
    return caught.value


def test_an_error_helps_by_the_argument_or_by_what_was_expected():
    assert not is_obscure(error_of(lambda: check.count("rank", "two")), "rank")
    assert not is_obscure(error_of(lambda: check.count("its size", "two")), "rank")
    assert is_obscure(error_of(lambda: "a" + 1), "rank")
    # PyTorch's arguments are others.
    assert is_obscure(error_of(lambda: torch.nn.functional.linear("a", "b")), "x")
    assert is_obscure(ValueError("ranks are wrong"), "rank")


def test_a_call_is_made_again_with_each_bad_value():
    given = {"probs": torch.tensor([[0.5, 0.5]]), "targets": torch.tensor([0])}
    call = Call("nll", nll, given, {})
    assert float(call.again("targets", torch.tensor([1]))) == pytest.approx(0.6931, abs=1e-3)
    assert {attempt(call, "targets", bad)[0] for bad in BAD} <= {"clear", "obscure"}
    assert attempt(call, "targets", "another shape")[0] == "clear"
