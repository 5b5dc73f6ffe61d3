"""Time of steps, compiled: what compiles, what it buys, and what a second fit pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from _by_hand import MeanField
from _harness import Case, Contestant, buildable, processor_time, run
from _nets import images, mlp, resnet18, vectors
from _traced import Handler
from torch import Tensor, nn
from training_step import METHODS, SCALE, hand_step, make_bnn, our_step, plain_step

import tyxe
from tyxe.bnn.training import FitOptions

NUM_POINTS = 50_000
START_UP = "seconds for three steps"
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


def compiled_step(
    bnn: tyxe.VariationalBNN, backend: str, handler: Handler, x: Tensor, y: Tensor
) -> Step:
    """Return the step of a new fit as `compile=True` makes it; not compiled in a smoke test."""
    return our_step(bnn, handler, x, y, FitOptions(compile=backend == "inductor"))


def contestant(
    name: str, who: str, limit: str | None, build: Callable[..., Step], *arguments: Any
) -> Contestant:
    """Build a contestant, and note the processor's seconds until its third step is done."""
    start = processor_time()
    step = build(*arguments)
    for _ in range(3):  # the first is not compiled, and looks at everything
        step()
    return Contestant(name, step, who, limit, facts={START_UP: processor_time() - start})


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
    for name, (method, handler) in METHODS.items():
        limit = f"{name}, by hand"
        add(limit, "by hand", None, by_hand, method, *data)
        add(f"{name}, ours", "ours", limit, eager, handler, *data)
        bnn = make_bnn(make_net(), NUM_POINTS)
        given = (bnn, backend, handler, x, y)
        add(f"{name}, ours, step compiled", "ours", limit, compiled_step, *given)
        add(f"{name}, ours, second fit", "ours", limit, compiled_step, *given)
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


if __name__ == "__main__":
    # Compiled code would draw its own random numbers, by a generator that is slow on CPUs.
    torch._inductor.config.fallback_random = True
    run(
        "Seconds of a training step with Adam, eager and compiled, and of those of a second fit.",
        {"mlp": mlp_case, "resnet18": resnet_case},
    )
