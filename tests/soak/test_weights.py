"""A weight of 2 is the point twice; a weight of 0, a mask and a missing target are its absence.

Each example draws a likelihood, data, what of them counts, and one of the uses that score,
calibrate, compare or curve; and compares with data in which points are repeated and left out by
hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tyxe
from tests.oracles.nets import KindAndSize
from tyxe.bnn.batches import batches_of, collect
from tyxe.bnn.potential import Potential
from tyxe.calibration import ScaleFactor, SplitConformal, TemperatureScaling
from tyxe.data import Targets
from tyxe.diagnostics import held_out
from tyxe.diagnostics.report import Case
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
    Poisson,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning"),
    pytest.mark.usefixtures("double"),
]
NAN, CLASSES, TOKENS = float("nan"), 3, 4
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
HIDDEN = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_all=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A likelihood with a net, how targets are drawn, and values that are none."""

    make: Callable[[int], Likelihood]
    net: Callable[[], nn.Module]
    targets: Callable[[int], Any]
    bad: Any
    missing: Any = None  # a value that says itself that it is missing


def _labels(n: int) -> Tensor:
    return torch.randint(CLASSES, (n,))


def _numbers(size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, size)


def _classes() -> nn.Module:
    return nn.Linear(2, CLASSES)


KINDS = {
    "classes": Kind(lambda n: Categorical(n, ignore_index=-100), _classes, _labels, -1, -100),
    "probabilities": Kind(
        lambda n: Categorical(n, logit_predictions=False),
        lambda: nn.Sequential(_classes(), nn.Softmax(-1)),
        _labels,
        -1,
    ),
    "class weights": Kind(
        lambda n: Categorical(n, class_weights=torch.tensor([0.5, 1.0, 2.0])), _classes, _labels, -1
    ),
    "soft labels": Kind(Categorical, _classes, lambda n: torch.rand(n, 3).softmax(-1), NAN, NAN),
    "binary": Kind(
        Bernoulli, lambda: nn.Linear(2, 1), lambda n: torch.rand(n, 1).round(), NAN, NAN
    ),
    "counts": Kind(
        Poisson, lambda: nn.Linear(2, 1), lambda n: torch.randint(4, (n, 1)).double(), -1.0, NAN
    ),
    "numbers": Kind(
        lambda n: HomoskedasticGaussian(n, scale=0.5),
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)),
        _numbers(2),
        NAN,
        NAN,
    ),
    "numbers with scales": Kind(
        HeteroskedasticGaussian, lambda: nn.Linear(2, 2), _numbers(1), NAN, NAN
    ),
    "tokens": Kind(
        lambda n: Categorical(n, ignore_index=-100),
        _classes,
        lambda n: torch.randint(CLASSES, (n, TOKENS)),
        -1,
        -100,
    ),
    "several": Kind(
        lambda n: Joint(
            kind=Categorical(n, ignore_index=-100), size=HomoskedasticGaussian(n, scale=0.5)
        ),
        lambda: KindAndSize(2),
        lambda n: {"kind": torch.randint(2, (n,)), "size": torch.randn(n, 1)},
        {"kind": -1, "size": NAN},
        {"kind": -100, "size": NAN},
    ),
    "several, with class weights": Kind(
        lambda n: Joint(
            kind=Categorical(n, class_weights=torch.tensor([0.5, 2.0])), size=Poisson(n)
        ),
        lambda: KindAndSize(2),
        lambda n: {"kind": torch.randint(2, (n,)), "size": torch.randint(4, (n, 1)).double()},
        {"kind": -1, "size": -1.0},
    ),
}
HOW = ("weights", "mask", "missing", "within")


@dataclasses.dataclass(frozen=True)
class Example:
    """Batches of a kind in which some points count otherwise than once, and the same by hand."""

    name: str
    how: str
    use: str
    given: list[Any]
    by_hand: list[Any]
    sizes: tuple[int, int]  # of the data set, of both
    mask: Tensor | None  # of points, for a handler
    seed: int  # of the weights


def _at(y: Any, rows: Any) -> Any:
    return {n: v[rows] for n, v in y.items()} if isinstance(y, dict) else y[rows]


def _with(y: Any, rows: Tensor, value: Any) -> Any:
    """Return targets with a value in some rows."""
    if isinstance(y, dict):
        return {n: _with(v, rows, value[n]) for n, v in y.items()}
    y = y.clone()
    y[rows] = value
    return y


def drawn(chance: random.Random) -> Example:
    """Draw an example."""
    name = chance.choice(list(KINDS))
    kind, seed = KINDS[name], chance.randrange(2**31)
    ways = [how for how in HOW if how != "within" or name == "tokens"]
    how = chance.choice([way for way in ways if way != "missing" or kind.missing is not None])
    uses = [u for u, (_, names) in USES.items() if not names or name in names]
    # A mask is of all batches inside of it, and the held-out ones have other rows.
    use = chance.choice([u for u in uses if how != "mask" or u != "validation"])
    if how == "within":
        use = chance.choice(WITHIN)
    torch.manual_seed(seed)
    n = chance.randint(7, 12)
    x, y = torch.randn(n, *[TOKENS] * (name == "tokens"), 2), kind.targets(n)
    if how == "within":
        kept = torch.rand(n, TOKENS) < 0.6
        kept[:4, 0] = True
        given, by_hand = [(x, _with(y, ~kept, kind.missing))], [(x[kept], y[kept])]
        sizes = int(kept.any(1).sum()), len(y[kept])
        return Example(name, how, use, given, by_hand, sizes, None, seed)
    counts = torch.tensor([chance.choice((0, 1, 1, 2)) for _ in range(n)])
    counts[:5] = counts[:5].clamp(min=1)
    counts = counts if how == "weights" else counts.clamp(max=1)
    rows = torch.arange(n).repeat_interleave(counts)
    bad = _with(y, counts == 0, kind.missing if how == "missing" else kind.bad)
    given = [(x, bad)]
    if how == "weights":
        half = slice(0, n // 2), slice(n // 2, n)
        given = [(x[part], _at(bad, part), counts[part].float()) for part in half]
    mask = counts > 0 if how == "mask" else None
    size = int(counts.sum()) * (2 if name == "class weights" else 1)
    return Example(name, how, use, given, [(x[rows], _at(y, rows))], (size, size), mask, seed)


# --------------------------------------------------------------------------- what is compared

Use = Callable[[Example, int, list[Any]], list[Any]]


def _made(wrapper: Any, prior: Any, example: Example, size: int, *more: Any, **how: Any) -> Any:
    kind = KINDS[example.name]
    torch.manual_seed(example.seed)
    return wrapper(kind.net(), prior, kind.make(size), *more, **how)


_plain = functools.partial(_made, tyxe.VariationalBNN, HIDDEN)
_laplace = functools.partial(_made, tyxe.LaplaceBNN, PRIOR)


def _evaluate(example: Example, size: int, batches: list[Any], reduction: str) -> list[Any]:
    found = _plain(example, size).evaluate(batches, reduction=reduction)
    return [v for one in found for v in (one.values() if isinstance(one, dict) else [one])]


def _scores(example: Example, size: int, batches: list[Any]) -> list[Any]:
    found = dict(tyxe.diagnostics.scores(_plain(example, size), batches))
    return [*found, *found.values()]


def _calibrator(make: Callable[[], Any]) -> Use:
    def calibrate(example: Example, size: int, batches: list[Any]) -> list[Any]:
        found = vars(make().wrap(_plain(example, size), batches).calibrator)
        return [found[n] for n in ("temperature", "factor", "threshold") if n in found]

    return calibrate


def _constant(example: Example, size: int, batches: list[Any]) -> list[Any]:
    case = Case.of(_plain(example, size), batches, batches, None, {"num_predictions": 1}, 1.0)
    return [line.value for check in (held_out.fit, held_out.calibration) for line in check(case)]


def _curve(example: Example, size: int, batches: list[Any], **options: Any) -> list[Any]:
    bnn = _laplace(example, size, **options)
    bnn.fit_curvature(batches)
    found = bnn.state.curvature
    scale = found.points / size
    numbers = found.log_likelihood * scale, found.error * scale, found.num_targets * scale
    return [found.operator.to_dense() * scale, *numbers]


def _evidence(example: Example, size: int, batches: list[Any]) -> list[Any]:
    bnn = _laplace(example, size, structure="diag")
    bnn.fit_curvature(batches)
    best = bnn.optimize_prior_precision(loader=batches, grid=[0.1, 1.0, 10.0])
    return [bnn.log_marginal_likelihood(), best]


def _gp(example: Example, size: int, batches: list[Any]) -> list[Any]:
    bnn = _laplace(example, size)
    bnn.fit_curvature(batches)
    bnn.fit_gp(batches)
    torch.manual_seed(0)
    return [bnn._gp(torch.randn(3, 2))[1]]


def _fit(example: Example, size: int, batches: list[Any], scale: float) -> list[Any]:
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=scale)
    bnn = _made(tyxe.VariationalBNN, PRIOR, example, size, guide)
    # In one step, as a batch's estimate is scaled by its own points.
    batches = [collect(bnn._to_fit(batches))]
    history = bnn.fit(batches, functools.partial(torch.optim.SGD, lr=0.01), 2, progress=False)
    return [history.loss, *bnn._mean_values().values()]


def _potential(example: Example, size: int, batches: list[Any], estimate: bool) -> list[Any]:
    bnn = _made(tyxe.MCMC_BNN, PRIOR, example, size, tyxe.samplers.HMC)
    data = collect(bnn._to_fit(batches))
    with torch.enable_grad():
        found = Potential(bnn, *data)
        flat = found.flatten(bnn._in_places()).detach().requires_grad_()
        value = found.estimate(flat, *data) if estimate else found.at(flat)
        return [value, torch.autograd.grad(value, flat)[0]]


def _held_out(example: Example, size: int, batches: list[Any]) -> list[Any]:
    bnn = _plain(example, size)
    train = [*batches_of(bnn._to_fit(example.by_hand))]
    history = bnn.fit(
        train, functools.partial(torch.optim.SGD, lr=0.0), 1, validation=batches, progress=False
    )
    return history.validation


_OF_CLASSES = ("classes", "probabilities", "class weights", "tokens")
_OF_NUMBERS = ("numbers",)
# The function, and the kinds that it is for, or none for all.
USES: dict[str, tuple[Use, tuple[str, ...]]] = {
    "evaluate, sum": (functools.partial(_evaluate, reduction="sum"), ()),
    "evaluate, mean": (functools.partial(_evaluate, reduction="mean"), ()),
    "scores": (_scores, ()),
    "temperature": (_calibrator(TemperatureScaling), (*_OF_CLASSES, "binary")),
    "sets": (_calibrator(lambda: SplitConformal("lac", level=0.6)), (*_OF_CLASSES, "binary")),
    "intervals": (_calibrator(lambda: SplitConformal(level=0.6)), _OF_NUMBERS),
    "scale factor": (_calibrator(ScaleFactor), _OF_NUMBERS),
    "diagnose": (_constant, ()),
    **{
        f"{how[0]}, {how[1]}": (functools.partial(_curve, structure=how[0], curvature=how[1]), ())
        for how in itertools.product(("full", "diag", "kron"), ("ggn", "empirical"))
    },
    # Of others the score of the grid is by samples, which depend on the rows.
    "evidence and grid": (_evidence, _OF_NUMBERS),
    "gp": (_gp, tuple(n for n in KINDS if n != "tokens")),
    "fit at draws": (functools.partial(_fit, scale=0.1), ()),
    "potential": (functools.partial(_potential, estimate=False), ()),
    "estimated potential": (functools.partial(_potential, estimate=True), ()),
    "validation": (_held_out, ()),
}
# Where each number within a point counts by itself, and not the point.
WITHIN = (
    "evaluate, sum",
    "temperature",
    "sets",
    *(name for name in USES if name.endswith("ggn")),
    "potential",
)


def compared(example: Example) -> str:
    """Return what differs from points repeated and left out by hand, or nothing."""
    use, _ = USES[example.use]
    found, (size, size_by_hand) = [], example.sizes
    ways = (example.given, size, example.mask), (example.by_hand, size_by_hand, None)
    for batches, size, mask in ways:
        handler: Any = contextlib.nullcontext()
        if mask is not None:
            handler = tyxe.poutine.selective_mask(mask=mask, expose=["likelihood.data"])
        try:
            with handler:
                found.append(use(example, size, batches))
        except (RuntimeError, TypeError, ValueError) as error:
            found.append([f"{type(error).__name__}: {error}"])
    what = f"{example.name}, {example.how}, {example.use}"
    try:
        for one, other in zip(*found, strict=True):
            if isinstance(one, str) or isinstance(other, str):
                assert one == other
                continue
            one, other = (torch.as_tensor(part).detach().double() for part in (one, other))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    except (AssertionError, ValueError) as error:
        return f"{what}: {error} {[part[:1] for part in found if isinstance(part[0], str)]}"
    return ""


def run(count: int, seed: int = 0) -> dict[str, Any]:
    """Compare `count` examples with points that are repeated and left out by hand."""
    chance = random.Random(seed)
    torch.set_default_dtype(torch.float64)
    try:
        found = [what for _ in range(count) if (what := compared(drawn(chance)))]
    finally:
        torch.set_default_dtype(torch.float32)
    return {"examples": count, "different": len(found), "found": found}


@settings(max_examples=50)
@given(st.integers(0, 2**31))
def test_what_counts_twice_or_not_at_all_is_repeated_or_left_out(seed: int) -> None:
    assert compared(drawn(random.Random(seed))) == ""


@pytest.mark.parametrize("broken", ["counts", "counts_within"])
def test_points_that_all_count_once_are_found_out(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(Targets, broken, lambda *_: None)
    chance = random.Random(0)
    assert sum(compared(drawn(chance)) != "" for _ in range(30)) > 5
