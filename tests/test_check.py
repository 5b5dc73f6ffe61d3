"""The vocabulary of checks: what passes comes back, and what does not is named with its remedy."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from tyxe import check


@dataclasses.dataclass(frozen=True)
class Options:
    rank: int = check.field(8, check.count)
    rate: float | None = check.field(None, check.number, above=0, most=1)
    other: Any = None

    def __post_init__(self) -> None:
        check.fields(self)


PASSES = [
    (check.count("n", np.int64(3)), 3),
    (check.count("n", torch.tensor(0), 0), 0),
    (check.number("x", 2), 2.0),
    (check.number("x", np.float32(0.5), above=0, below=1), 0.5),
    (check.number("x", torch.tensor([1.0]), least=1, most=1), 1.0),
    (check.choice("kind", None, ("a", None)), None),
    (check.one_of("x", "a", str | int, "a name"), "a"),
    (Options(rank=np.int64(2)).rank, 2),
    (Options().rate, None),
]


@pytest.mark.parametrize(("found", "expected"), PASSES)
def test_what_passes_comes_back_as_plain_python(found: Any, expected: Any) -> None:
    assert found == expected
    assert type(found) is type(expected)


REFUSED = {
    "a boolean count": (lambda: check.count("n", True), "n is True; expected an integer"),
    "half a count": (
        lambda: check.count("n", 1.5, hint=": n=1"),
        "is 1.5; expected an integer: n=1",
    ),
    "too few": (lambda: check.count("n", 0), "n is 0; expected 1 or more"),
    "a text": (lambda: check.number("x", "1"), "x is '1'; expected a number"),
    "several numbers": (
        lambda: check.number("x", torch.ones(2)),
        "x is a Tensor; expected a number",
    ),
    "NaN": (lambda: check.number("x", math.nan), "x is nan; expected a number"),
    "infinite": (lambda: check.number("x", math.inf, above=0), "expected a number above 0"),
    "on the bound": (lambda: check.number("x", 0, above=0), "x is 0; expected a number above 0"),
    "too large": (
        lambda: check.number("x", 2, least=0, most=1, hint=": pass x=1"),
        "x is 2; expected a number of 0 or more and at most 1: pass x=1",
    ),
    "an open end": (lambda: check.number("x", 1, above=0, below=1), "a number above 0 and below 1"),
    "unknown": (lambda: check.choice("x", "c", ("a", "b")), "x is 'c'; expected one of 'a', 'b'"),
    "a tensor for a name": (
        lambda: check.choice("x", torch.ones(2), ("a",)),
        "x is a Tensor; expected one of 'a'",
    ),
    "a class": (
        lambda: check.one_of("x", int, str, "a name"),
        "x is the class int; expected a name",
    ),
    "sizes": (
        lambda: check.shape("x", torch.ones(2, 3), ("n", 2), ": transpose it"),
        r"x has shape \(2, 3\); expected \(n, 2\): transpose it",
    ),
    "dimensions": (lambda: check.shape("x", torch.ones(2, 3), ("n",)), r"expected \(n,\)"),
    "a field": (lambda: Options(rank=0), "rank is 0"),
    "an optional field": (lambda: Options(rate=2), "rate is 2"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_is_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_memory_has_one_limit_and_each_device_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    check.memory("a matrix", 8 * 2**30, "use less")
    with pytest.raises(ValueError, match=r"would take 8\.0 GiB, and the limit is 8 GiB: use less"):
        check.memory("a matrix", 8 * 2**30 + 1, "use less")
    check.memory("a matrix", 2**40, "use less", torch.device("meta"))  # nobody says how much it has
    monkeypatch.setattr(check, "_memory_of", lambda device: 2**30)
    with pytest.raises(ValueError, match="the limit of cpu is 1 GiB"):
        check.memory("a matrix", 2**31, "use less", torch.device("cpu"))
