"""Time of steps, compiled: what compiles, what it buys, and what a second fit pays."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

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
# Traced but not compiled, in a smoke test: the code that is generated is PyTorch's affair.
BACKENDS = {False: "inductor", True: "eager"}
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


def makers(
    make_net: Nets, x: Tensor, y: Tensor, backend: str
) -> dict[str, Callable[[], Contestant]]:
    """Return how to build plain steps, and those of two methods: by hand, ours, ours compiled."""
    found = {}

    def add(name: str, who: str, limit: str | None, build: Callable[..., Step], *given: Any):
        found[name] = lambda: Contestant(name, build(*given), who, limit)

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


def seconds_to_start(case: str, contestants: list[str], smoke_test: bool) -> float:
    """Return the processor's seconds until a contestant's third step, made after those before."""
    _, data = CASES[case](smoke_test)
    found = makers(*data, BACKENDS[smoke_test])
    for name in contestants:
        start = processor_time()
        step = found[name]().run
        for _ in range(3):  # the first is not compiled, and looks at everything
            step()
    return processor_time() - start


def first_seconds(case: str, name: str, smoke_test: bool) -> float:
    """Return `seconds_to_start` of a process of its own, which finds nothing compiled on disk."""
    before = [name.replace("second fit", "step compiled")] if name.endswith("second fit") else []
    given = (case, [*before, name], smoke_test)
    if smoke_test:
        return seconds_to_start(*given)
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"), folder)
        with (
            mock.patch.dict(os.environ, places),
            ProcessPoolExecutor(1, start, prepare, (torch.get_num_threads(),)) as pool,
        ):
            return pool.submit(seconds_to_start, *given).result()


def prepare(threads: int) -> None:
    """Set what holds for a process."""
    torch.set_num_threads(threads)
    # Compiled code would draw its own random numbers, by a generator that is slow on CPUs.
    torch._inductor.config.fallback_random = True


def compiled_case(name: str, repeats: int, smoke_test: bool) -> Case:
    """Return a case of what could be compiled, which says what could not."""
    title, data = CASES[name](smoke_test)
    found, errors = buildable(makers(*data, BACKENDS[smoke_test]))
    found = [
        replace(one, facts={START_UP: first_seconds(name, one.name, smoke_test)}) for one in found
    ]
    return Case(name, title, "step", repeats, found, findings=lambda _: errors)


def mlp_data(smoke_test: bool) -> tuple[str, tuple[Nets, Tensor, Tensor]]:
    """Return the MLP's title, net and batch."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    return "MLP 784-400-400-10, batch 128", (lambda: mlp(smoke_test), x, y)


def resnet_data(smoke_test: bool) -> tuple[str, tuple[Nets, Tensor, Tensor]]:
    """Return the ResNet's, on few images."""
    x, y = images(2 if smoke_test else 8, smoke_test)
    return "ResNet-18 on 32 x 32 images, batch 8", (lambda: resnet18(smoke_test), x, y)


CASES = {"mlp": mlp_data, "resnet18": resnet_data}


if __name__ == "__main__":
    prepare(torch.get_num_threads())
    run(
        "Seconds of a training step with Adam, eager and compiled, and of those of a second fit.",
        {
            "mlp": functools.partial(compiled_case, "mlp", 40),
            "resnet18": functools.partial(compiled_case, "resnet18", 5),
        },
    )
