"""The vocabulary of checks: what passes comes back, and what does not is named with its remedy."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from tyxe import LaplaceBNN, check, estimate_evidence
from tyxe.bnn import elbo_terms
from tyxe.calibration import CVPlus
from tyxe.likelihoods import HomoskedasticGaussian, Ordinal, censored_targets
from tyxe.predictive import Ensemble
from tyxe.priors import IIDPrior


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
    (check.count("n", 3, most=3), 3),
    (check.choice("kind", None, ("a", None)), None),
    (check.known(0, "there is none"), 0),
    (check.points(0.5), 0.5),
    (check.function("f", int, "a function"), int),
    (check.listed("names", ("a", "b")), ("a", "b")),
    (Options(rank=np.int64(2)).rank, 2),
    (Options().rate, None),
]


@pytest.mark.parametrize(("found", "expected"), PASSES)
def test_what_passes_comes_back_as_plain_python(found: Any, expected: Any) -> None:
    assert found == expected
    assert type(found) is type(expected)


ONE = torch.ones(())
REFUSED = {
    "a boolean count": (lambda: check.count("n", True), "n is True; expected an integer"),
    "half a count": (
        lambda: check.count("n", 1.5, hint=": n=1"),
        "is 1.5; expected an integer: n=1",
    ),
    "a text": (lambda: check.number("x", "1"), "x is '1'; expected a number"),
    "several numbers": (lambda: check.number("x", torch.ones(2)), "x is a Tensor; expected a numb"),
    "NaN": (lambda: check.number("x", math.nan), "x is nan; expected a number"),
    "on the bound": (lambda: check.number("x", 0, above=0), "x is 0; expected a number above 0"),
    "too large": (
        lambda: check.number("x", 2, least=0, most=1, hint=": pass x=1"),
        "x is 2; expected a number of 0 or more and at most 1: pass x=1",
    ),
    "unknown": (lambda: check.choice("x", "c", ("a", "b")), "x is 'c'; expected one of 'a', 'b'"),
    "a tensor for a name": (lambda: check.choice("x", torch.ones(2), ("a",)), "x is a Tensor; ex"),
    "a class": (
        lambda: check.one_of("x", int, str, "a name"),
        "x is the class int; expected a name",
    ),
    "sizes": (
        lambda: check.shape("x", torch.ones(2, 3), ("n", 2), ": transpose it"),
        r"x has shape \(2, 3\); expected \(n, 2\): transpose it",
    ),
    "dimensions": (lambda: check.shape("x", torch.ones(2, 3), ("n",)), r"expected \(n,\)"),
    "too few dimensions": (
        lambda: check.shape("x", torch.ones(2), ("n", ..., 1)),
        r"x has shape \(2,\); expected \(n, ..., 1\)",
    ),
    "the last dimension": (
        lambda: check.shape("x", torch.ones(2, 3, 4), ("n", ..., 1)),
        r"x has shape \(2, 3, 4\); expected \(n, ..., 1\)",
    ),
    "a count above": (lambda: check.count("n", 4, most=3), "n is 4; expected 1 to 3"),
    "a number that is out": (
        lambda: check.numbers("x", torch.tensor([0.5, 2.0]), "shares", least=0, most=1),
        "x ranges from 0.5 to 2; expected shares",
    ),
    "a number on the bound": (
        lambda: check.numbers("x", torch.tensor(0), "positive numbers", above=0),
        "x is 0; expected positive numbers",
    ),
    "NaN among numbers": (
        lambda: check.numbers("x", torch.tensor([0.5, math.nan]), "finite numbers"),
        "x ranges from nan to nan; expected finite numbers",
    ),
    "infinity": (lambda: check.numbers("x", ONE / 0, "finite numbers"), "x is inf; expected fin"),
    "a net": (lambda: check.function("f", nn.ReLU(), "a function"), "f is a ReLU; expected a fun"),
    "a text for a list": (
        lambda: check.listed("names", "a"),
        r"names is 'a'; expected a list: names=\['a'\]",
    ),
    "a number for a list": (lambda: check.listed("x", 3), r"x is 3; expected a list: x=\[...\]"),
    "no points": (lambda: check.points(0), "no point counts: look for NaN in targets"),
    "a shape of a list": (lambda: check.shape("x", [1], (1,)), "x is a list; expected a tensor"),
    "one of flags": (lambda: check.flags(x=True, y=None, z=0), "z is 0; expected True or False"),
    "words for numbers": (lambda: check.tensor("x", ["a"]), "x is a list; expected a tensor or nu"),
    "a field": (lambda: Options(rank=0), "rank is 0"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_is_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_shapes_of_any_dimensions_and_no_numbers_pass() -> None:
    for x in (torch.ones(2, 1), torch.ones(2, 3, 4, 1)):
        assert check.shape("x", x, ("n", ..., 1)) is x
    empty = torch.ones(0)
    assert check.numbers("x", empty, "positive numbers", above=0) is empty
    with pytest.raises(RuntimeError, match="call fit"):
        check.known(None, "there is nothing: call fit")


class Draws(Protocol):
    def draw(self) -> Tensor: ...


@check.arguments
def called(
    x: Tensor,
    scale: float | Tensor = 1.0,
    *more: int,
    net: nn.Module | None = None,
    shape: Sequence[int] = (),
    names: Iterable[str] = (),
    function: Callable[[Tensor], Any] = abs,
    kind: type = int,
    options: Options | None = None,
    draws: Draws | None = None,
    count: int = 1,
    is_last: bool = False,
    path: str = "",
    **others: float,
) -> str:
    return "called"


@check.arguments
@dataclasses.dataclass
class Node:
    value: int
    parent: "Node | None" = None


ANY = torch.ones(2)
CALLS: list[tuple[Any, ...]] = [
    (ANY, torch.ones(3)),
    (ANY, np.float32(1.0), "more", "are not looked at"),
    (nn.Parameter(ANY), torch.tensor(2)),
]
KEYWORDS: list[dict[str, Any]] = [
    {"net": nn.Linear(1, 1), "shape": torch.Size([1]), "names": {"a"}, "kind": Options},
    {"shape": [1], "function": nn.ReLU(), "options": Options(), "draws": 3, "others": "any"},
    {"count": np.int64(1), "is_last": True, "scale": torch.tensor([1])},
]
WRONG_KINDS: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.0]}, "x is a list; expected a tensor$"),
    ({"scale": "a"}, "scale is 'a'; expected a number or a tensor$"),
    ({"shape": 3}, "shape is 3; expected a sequence$"),
    ({"names": "weight"}, "names is 'weight'; expected an iterable$"),
    ({"function": 3}, "function is 3; expected a function$"),
    ({"kind": 3}, "kind is 3; expected a class$"),
    ({"options": 3}, "options is 3; expected an Options or None$"),
    ({"count": 1.0}, "count is 1.0; expected an integer$"),
    ({"is_last": 1}, "is_last is 1; expected True or False$"),
    ({"path": b"file"}, "path is a bytes; expected a string$"),
]


def test_annotations_say_what_a_call_takes() -> None:
    assert {called(*args) for args in CALLS} == {"called"}
    assert {called(ANY, **options) for options in KEYWORDS} == {"called"}
    assert Node(1, Node(2)).parent == Node(2)
    with pytest.raises(TypeError, match=r"parent is 3; expected a Node or None"):
        Node(1, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        called()  # type: ignore[call-arg]


@pytest.mark.parametrize(("options", "message"), WRONG_KINDS)
def test_arguments_of_another_kind_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        called(**({"x": ANY} | options))


OF_ANOTHER_KIND = {
    "model is 5": lambda: elbo_terms(5, max),  # type: ignore[arg-type]
    "closed_form_kl is 'no'": lambda: elbo_terms(max, max, closed_form_kl="no"),  # type: ignore[arg-type]
    "left has shape": lambda: censored_targets(torch.ones(2), left=torch.tensor(True)),
    "cut_points is 'a'": lambda: Ordinal(9, 3, cut_points="a"),  # type: ignore[arg-type]
    "the number of members is 0": lambda: Ensemble([]),
    "bnn is -1": lambda: estimate_evidence(-1, []),  # type: ignore[arg-type]
    "y is None": lambda: CVPlus(max).fit(torch.ones(9), None),  # type: ignore[arg-type]
    "x has shape": lambda: CVPlus(max).fit(torch.ones(9), torch.ones(12)),
    "process_group is nan": lambda: laplace().fit_curvature([], process_group=math.nan),
    "prior_precision is 'a'": lambda: laplace().log_marginal_likelihood("a"),  # type: ignore[arg-type]
    "prior_precision of .* has shape": lambda: laplace().log_marginal_likelihood(torch.ones(2, 7)),
}


def laplace() -> LaplaceBNN:
    likelihood = HomoskedasticGaussian(2, scale=0.5)
    bnn = LaplaceBNN(nn.Linear(1, 1), IIDPrior(dist.Normal(0, 1)), likelihood)
    bnn.fit_curvature([(torch.ones(2, 1), torch.ones(2, 1))], progress=False)
    return bnn


@pytest.mark.parametrize("message", OF_ANOTHER_KIND)
def test_public_calls_name_what_is_of_another_kind(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{message}.*; expected"):
        OF_ANOTHER_KIND[message]()


def test_memory_has_one_limit_and_each_device_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    check.memory("a matrix", 8 * 2**30, "use less")
    with pytest.raises(ValueError, match=r"would take 8\.0 GiB, and the limit is 8 GiB: use less"):
        check.memory("a matrix", 8 * 2**30 + 1, "use less")
    check.memory("a matrix", 2**40, "use less", torch.device("meta"))  # nobody says how much it has
    monkeypatch.setattr(check, "_memory_of", lambda device: 2**30)
    with pytest.raises(ValueError, match="the limit of cpu is 1 GiB"):
        check.memory("a matrix", 2**31, "use less", torch.device("cpu"))


def test_what_an_extra_installs_is_named() -> None:
    assert check.installed("math", "plot") is math
    with pytest.raises(ImportError, match=r"No module named 'none_such': .* \"\.\[plot\]\"$"):
        check.installed("none_such.part", "plot")
