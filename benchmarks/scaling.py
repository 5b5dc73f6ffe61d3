"""How time and memory grow: step, prediction, curvature, evidence and linearised predictive."""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyro.distributions as dist
import torch
from _harness import Case, Contestant, Numbers, run
from memory import exponent, recorded, rounded
from torch import Tensor, nn
from training_step import SCALE, our_step, plain_step

import tyxe
from tyxe.bnn.training import FitOptions

FEATURES, BATCH = 64, 128
PEAK = "peak, MB"


@dataclass(frozen=True)
class Size:
    """How much there is of everything; `parts` are layers beside each other in the place of one."""

    width: int = 128
    depth: int = 2
    classes: int = 10
    points: int = 512
    draws: int = 8
    parts: int = 1


AXES: dict[str, tuple[int, ...]] = {
    "width": (64, 128, 256, 512),
    "depth": (1, 2, 4, 8),
    "classes": (5, 10, 20, 40),
    "points": (128, 512, 1024, 2048),
    "draws": (2, 4, 8, 16, 32),
    "parts": (1, 4, 16),
}


class Parts(nn.Module):
    """A linear map as several beside each other: as many weights, in more sites."""

    def __init__(self, fan_in: int, fan_out: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out // count) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs side by side."""
        return torch.cat([layer(x) for layer in self.layers], -1)


def net_of(size: Size) -> nn.Sequential:
    """Return an MLP."""
    widths = [FEATURES, *[size.width] * size.depth]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        one = size.parts == 1
        linear = nn.Linear(fan_in, fan_out) if one else Parts(fan_in, fan_out, size.parts)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(size.width, size.classes))


def data_of(size: Size) -> tuple[Tensor, Tensor]:
    """Return random rows and labels."""
    return torch.randn(size.points, FEATURES), torch.randint(size.classes, (size.points,))


PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
Work = Callable[[], Any]


def variational(size: Size) -> tyxe.VariationalBNN:
    """Return a mean field."""
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=SCALE)
    likelihood = tyxe.likelihoods.Categorical(size.points)
    return tyxe.VariationalBNN(net_of(size), PRIOR, likelihood, guide)


def laplace(size: Size, structure: str = "kron") -> tuple[tyxe.LaplaceBNN, Work]:
    """Return a Laplace approximation, and what takes its curvature."""
    likelihood = tyxe.likelihoods.Categorical(size.points)
    bnn = tyxe.LaplaceBNN(net_of(size), PRIOR, likelihood, structure=structure)
    x, y = data_of(size)
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    return bnn, functools.partial(bnn.fit_curvature, batches, progress=False)


def step(size: Size) -> Work:
    """Return a training step of a mean field on all points, with its number of draws."""
    options = FitOptions(num_particles=size.draws)
    x, y = data_of(size)
    return our_step(variational(size), tyxe.poutine.local_reparameterization, x, y, options)


def prediction(size: Size) -> Work:
    """Return predictions of all points."""
    bnn, (x, _) = variational(size), data_of(size)
    return lambda: bnn.predict(x, num_predictions=size.draws)


def curvature(structure: str, size: Size) -> Work:
    """Return a pass over the data."""
    return laplace(size, structure)[1]


def evidence(size: Size) -> Work:
    """Return the evidence at a new prior precision, of Kronecker factors."""
    bnn, take = laplace(size)
    take()
    precisions = itertools.count(1)

    def run_evidence() -> None:
        bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, next(precisions) ** -0.5)))
        bnn.log_marginal_likelihood()

    return run_evidence


def linearised(size: Size) -> Work:
    """Return the linearised predictive of all points, of Kronecker factors."""
    bnn, take = laplace(size)
    take()
    x, _ = data_of(size)
    return lambda: bnn.predict(x, num_predictions=100, batch_size=BATCH)


WORKS: dict[str, tuple[Callable[[Size], Work], str, tuple[str, ...]]] = {
    "step": (step, "training step of a mean field, by local reparameterisation", tuple(AXES)),
    "prediction": (prediction, "prediction by draws", tuple(AXES)),
    "kron": (
        functools.partial(curvature, "kron"),
        "curvature pass, Kronecker factors",
        ("width", "depth", "classes", "points", "parts"),
    ),
    "diag": (
        functools.partial(curvature, "diag"),
        "curvature pass, diagonal",
        ("width", "depth", "classes", "points", "parts"),
    ),
    "evidence": (
        evidence,
        "evidence at another prior precision",
        ("width", "depth", "classes", "points", "parts"),
    ),
    "glm": (
        linearised,
        "linearised predictive",
        ("width", "depth", "classes", "points", "parts"),
    ),
}


def sizes_on(axis: str, smoke_test: bool) -> list[Size]:
    """Return the sizes of one axis, all else as it is."""
    base = Size(width=16, points=8, draws=2) if smoke_test else Size()
    values = AXES[axis][:2] if smoke_test else AXES[axis]
    return [replace(base, **{axis: value}) for value in values]


def contestant(axis: str, size: Size, make: Callable[[Size], Work]) -> Contestant:
    """Return one size's work, and the peak of the bytes that it allocates."""
    work = make(size)
    work()  # the first is checked, and makes what lives on

    def once() -> None:
        work()

    fact = {PEAK: rounded(recorded(once)[0] / 1e6)}
    return Contestant(f"{axis} {getattr(size, axis)}", once, "ours", facts=fact)


def exponents(found: list[Contestant]) -> Callable[[Numbers], dict[str, float]]:
    """Return the exponents of time and memory on every axis, from its three largest sizes."""

    def findings(numbers: Numbers) -> dict[str, float]:
        results = {}
        for axis in dict.fromkeys(c.name.split()[0] for c in found):
            rows = [c for c in found if c.name.split()[0] == axis][-3:]
            sizes = [float(c.name.split()[1]) for c in rows]
            seconds = [sorted(numbers[c.name])[len(numbers[c.name]) // 2] for c in rows]
            peaks = [max(c.facts[PEAK], 1e-6) for c in rows]
            for what, values in (("time", seconds), ("memory", peaks)):
                results[f"{axis}, {what}"] = rounded(exponent(sizes, values))
        return {name: value for name, value in results.items() if math.isfinite(value)}

    return findings


def case_of(name: str, smoke_test: bool) -> Case:
    """Return the case of one kind of work: every size of every axis."""
    make, title, axes = WORKS[name]
    base = sizes_on("parts", smoke_test)[0]
    x, y = data_of(base)
    found = [contestant(axis, size, make) for axis in axes for size in sizes_on(axis, smoke_test)]
    plain = Contestant("plain step", plain_step(net_of(base), x, y), "plain")
    return Case(name, title, "call", 7, [plain, *found], findings=exponents(found))


if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    run(
        "Seconds and peak of the bytes allocated, as one of width, depth, classes, points, draws "
        "and parts (sites with as many weights) grows from an MLP 64-128-128-10 on 512 points.",
        {name: functools.partial(case_of, name) for name in WORKS},
    )
