"""What runs on a GPU, and how fast: steps, fits, predictions, curvature and samplers.

`--all` runs the tests of `tests/gpu` first, and writes what came of them into the results too.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gpu_laplace
import gpu_predict
import pyro
import torch
from _gpu import FINISHED, ROOT, Makers, Step, device, reported
from _harness import Case, Contestant, Numbers, run, summary
from _nets import images, mlp, resnet18, vectors
from torch import Tensor, nn
from training_step import METHODS, SCALE, hand_step, make_bnn, our_step, plain_step

from tyxe.bnn.training import FitOptions

NUM_POINTS, STEPS, FIT = 50_000, 10, 100
Nets = Callable[[], nn.Module]


# --------------------------------------------------------------------------- steps


def steps_of(
    name: str, who: str, build: Callable[[], Step], limit: str | None = None
) -> Contestant:
    """Return some steps in a row, as in a fit, between which the host need not wait."""
    step = build()

    def several() -> int:
        for _ in range(STEPS):
            step()
        return STEPS

    return Contestant(name, several, who, limit)


def step_case(name: str, title: str, make_net: Nets, x: Tensor, y: Tensor) -> Case:
    """Return steps of the plain net, and of every method by hand, uncompiled and compiled."""
    x, y = x.to(device()), y.to(device())

    def net() -> nn.Module:
        return make_net().to(device())

    def ours(handler: Any, compile: bool) -> Step:
        options = FitOptions(compile=compile)
        return our_step(make_bnn(net(), NUM_POINTS), handler, x, y, options)

    plain = functools.partial(plain_step, net(), x, y)
    makers: Makers = {"plain": functools.partial(steps_of, "plain PyTorch", "plain", plain)}
    for method, (by_hand, handler) in METHODS.items():
        limit = f"{method}, by hand"

        def hand(by_hand: Any = by_hand) -> Step:
            return hand_step(by_hand(net(), NUM_POINTS, SCALE), x, y)

        makers[limit] = functools.partial(steps_of, limit, "by hand", hand)
        # To compile each on a CPU would take a smoke test a minute.
        for how in ("ours", "ours, compiled") if device().type == "cuda" else ("ours",):
            build = functools.partial(ours, handler, how != "ours")
            row = f"{method}, {how}"
            makers[row] = functools.partial(steps_of, row, "ours", build, limit)
    return reported(name, title, "step", makers)


# --------------------------------------------------------------------------- fits


def fit_case(smoke_test: bool) -> Case:
    """Return further compiled fits of the MLP, of which one has three times as many steps."""
    x, y = vectors(4 if smoke_test else 128, smoke_test)
    x, y = x.to(device()), y.to(device())
    count = 2 if smoke_test else FIT
    bnn = make_bnn(mlp(smoke_test).to(device()), len(x) * count)

    def fit(epochs: int) -> None:
        bnn.fit([(x, y)] * count, pyro.optim.Adam({"lr": 1e-3}), epochs, compile=True)

    start = time.perf_counter()
    fit(1)
    facts = {"seconds of the first": round(time.perf_counter() - start, 3)}
    step = plain_step(mlp(smoke_test).to(device()), x, y)

    def plain() -> None:
        for _ in range(count):
            step()

    short, long = f"fit of {count} steps", f"fit of {3 * count} steps"
    found = [
        Contestant("plain PyTorch", plain, "plain"),
        Contestant(short, functools.partial(fit, 1), "ours", facts=facts),
        Contestant(long, functools.partial(fit, 3), "ours"),
    ]

    def beyond(numbers: Numbers) -> dict[str, Any]:
        pairs = zip(numbers[short], numbers[long], strict=True)
        return {
            "seconds beyond the steps": summary(one - (three - one) / 2 for one, three in pairs)
        }

    title = "Further compiled fits of the MLP"
    return Case("second_fit", title, "fit", 5, found, True, FINISHED, beyond)


# --------------------------------------------------------------------------- checks


def checks_case(smoke_test: bool) -> Case:
    """Return the tests of GPUs, as one run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    command += ["--co"] if smoke_test else []
    outcome = ""

    def tests() -> None:
        nonlocal outcome
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        lines = found.stdout.strip().splitlines() or [found.stderr[-200:]]
        outcome = "; ".join([*(line for line in lines if line.startswith("FAILED")), lines[-1]])

    found = [Contestant("tests/gpu", tests, "ours")]
    said = lambda _: {"outcome": outcome}  # noqa: E731
    return Case("checks", "Tests on the GPU", "run", 1, found, False, FINISHED, said)


# --------------------------------------------------------------------------- cases


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's steps."""
    x, y = vectors(4 if smoke_test else 128, smoke_test)
    make_net = functools.partial(mlp, smoke_test)
    return step_case("mlp_step", "MLP 784-400-400-10, batch 128", make_net, x, y)


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's steps."""
    x, y = images(2 if smoke_test else 128, smoke_test)
    make_net = functools.partial(resnet18, smoke_test)
    title = "ResNet-18 on 32 x 32 images, batch 128"
    return step_case("resnet18_step", title, make_net, x, y)


def on_device(make: Callable[..., Case]) -> Callable[[bool], Case]:
    """Return a case's maker for the device."""
    return functools.partial(make, device=device(), quantity=FINISHED)


CASES: dict[str, Callable[[bool], Case]] = {
    "mlp_step": mlp_case,
    "resnet18_step": resnet_case,
    "second_fit": fit_case,
    **gpu_predict.CASES,
    **{name: on_device(make) for name, make in gpu_laplace.CASES.items()},
}

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not torch.cuda.is_available() and "--smoke-test" not in arguments:
        print("benchmarks/gpu.py: no CUDA device here, so nothing was measured")
        sys.exit(0)
    if "--all" in arguments:
        arguments.remove("--all")
        CASES = {"checks": checks_case, **CASES}
    run(
        "Seconds of training steps, fits, predictions, curvature and samplers on a GPU, and ratios "
        "to a plain net that runs eagerly.",
        CASES,
        arguments,
    )
