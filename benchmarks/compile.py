"""Time of steps, and of batches of a curvature, compiled: what compiles, and what it buys."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._inductor.config
from _by_hand import MeanField
from _harness import Case, Contestant, buildable, run
from _nets import images, mlp, resnet18, vectors
from _traced import Handler
from laplace import PASSES, cnn, data
from laplace import make_bnn as make_laplace
from torch import Tensor, nn
from training_step import METHODS, SCALE, hand_step, make_bnn, our_step, plain_step

import tyxe
from tyxe.bnn.compiled import CompiledCurvature
from tyxe.bnn.training import FitOptions
from tyxe.curvature.collect import CurvatureSums
from tyxe.data import Targets

HANDLERS: dict[str, Handler] = {
    "plain sampling": nullcontext,
    "local reparameterisation": tyxe.poutine.local_reparameterization,
    "flipout": tyxe.poutine.flipout,
}
NUM_POINTS = 50_000
START_UP = "seconds for two steps"
Step = Callable[[], None]
Nets = Callable[[], nn.Module]


def eager_plain(make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the plain step."""
    return plain_step(make_net(), x, y)


def compiled_plain(backend: str, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the plain step of a compiled net."""
    net = make_net()
    net.compile(backend=backend)
    return plain_step(net, x, y)


def by_hand(method: type[MeanField], make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the step of one method by hand."""
    return hand_step(method(make_net(), NUM_POINTS, SCALE), x, y)


def eager(handler: Handler, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return our step."""
    return our_step(make_bnn(make_net(), NUM_POINTS), handler, x, y)


def compiled_net(backend: str, handler: Handler, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return our step with the BNN's net compiled in place; a copy of a compiled net is not."""
    bnn = make_bnn(make_net(), NUM_POINTS)
    bnn.net.compile(backend=backend)
    return our_step(bnn, handler, x, y)


def compiled_step(backend: str, handler: Handler, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return our step as `fit(..., compile=True)` makes it; not compiled in a smoke test."""
    options = FitOptions(compile=backend == "inductor")
    return our_step(make_bnn(make_net(), NUM_POINTS), handler, x, y, options)


def contestant(
    name: str, who: str, limit: str | None, build: Callable[..., Step], *arguments: Any
) -> Contestant:
    """Build a contestant, and note the seconds until its second step is done."""
    start = time.perf_counter()
    step = build(*arguments)
    step()
    step()
    return Contestant(name, step, who, limit, facts={START_UP: time.perf_counter() - start})


def makers(
    make_net: Nets, x: Tensor, y: Tensor, backend: str
) -> dict[str, Callable[[], Contestant]]:
    """Return how to build plain steps, and those of two methods: by hand, ours, ours compiled."""
    found = {}

    def add(name: str, who: str, limit: str | None, build: Callable[..., Step], *given: Any):
        found[name] = functools.partial(contestant, name, who, limit, build, *given)

    data = (make_net, x, y)
    add("plain PyTorch", "plain", None, eager_plain, *data)
    add("plain PyTorch, compiled", "plain", None, compiled_plain, backend, *data)
    for name, handler in HANDLERS.items():
        limit = f"{name}, by hand"
        add(limit, "by hand", None, by_hand, METHODS[name][0], *data)
        add(f"{name}, ours", "ours", limit, eager, handler, *data)
        add(f"{name}, ours, net compiled", "ours", limit, compiled_net, backend, handler, *data)
        add(f"{name}, ours, step compiled", "ours", limit, compiled_step, backend, handler, *data)
    return found


def compiled_case(
    name: str, title: str, repeats: int, data: tuple[Nets, Tensor, Tensor], smoke_test: bool
) -> Case:
    """Return a case of what could be compiled, which says what could not."""
    # Traced but not compiled, in a smoke test: the code that is generated is PyTorch's affair.
    backend = "eager" if smoke_test else "inductor"
    found, errors = buildable(makers(*data, backend))
    return Case(name, title, "step", repeats, found, findings=lambda _: errors)


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    data = (lambda: mlp(smoke_test), x, y)
    return compiled_case("mlp", "MLP 784-400-400-10, batch 128", 40, data, smoke_test)


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's case, on few images."""
    x, y = images(2 if smoke_test else 8, smoke_test)
    data = (lambda: resnet18(smoke_test), x, y)
    title = "ResNet-18 on 32 x 32 images, batch 8"
    return compiled_case("resnet18", title, 5, data, smoke_test)


def added_batch(compiles: bool, structure: str, curvature: str, smoke_test: bool) -> Step:
    """Return the addition of a batch to a curvature, as `fit_curvature(compile=...)` makes it."""
    net, batches = cnn(smoke_test), data(smoke_test)
    bnn = make_laplace(net.eval(), NUM_POINTS, structure, curvature)
    sums = CurvatureSums(bnn.linearize, bnn.likelihood, structure, curvature, reduce=False)
    add = CompiledCurvature(bnn, sums) if compiles else sums.add
    x, y = batches[0]

    def step() -> None:
        with torch.no_grad():
            add(x, y, Targets(y))

    return step


def curvature_case(smoke_test: bool) -> Case:
    """Return the case of a batch of a curvature."""
    x, y = data(smoke_test)[0]
    found = [contestant("plain PyTorch", "plain", None, plain_step, cnn(smoke_test), x, y)]
    for name, (structure, curvature, _) in PASSES.items():
        given = (structure, curvature, smoke_test)
        # Of a compiler only where it is the compiler's code that is timed.
        for compiles in (False,) if smoke_test else (False, True):
            title = f"{name}, compiled" if compiles else name
            limit = name if compiles else None
            found.append(contestant(title, "ours", limit, added_batch, compiles, *given))
    title = "Curvature of conv16-conv32-fc128-fc10, a batch of 100"
    return Case("curvature", title, "batch", 20, found)


if __name__ == "__main__":
    # Compiled code would draw its own random numbers, by a generator that is slow on CPUs.
    torch._inductor.config.fallback_random = True
    run(
        "Seconds of a training step with Adam, or of a curvature's batch, eager and compiled.",
        {"mlp": mlp_case, "resnet18": resnet_case, "curvature": curvature_case},
    )
