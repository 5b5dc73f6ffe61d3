"""Memory of a training step: the plain net, each method by hand, and ours; growth with the net."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from _harness import Case, Clock, Contestant, Numbers, Quantity, run
from _nets import dense, images, mlp, resnet18, vectors
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from training_step import METHODS, SCALE, hand_step, make_bnn, our_step, plain_step

PARAMETERS, ACTIVATIONS = "net's parameters, MB", "plain activations, MB"
KEPT = "kept between steps, MB"
Step = Callable[[], None]
Nets = Callable[[], nn.Module]
NUM_POINTS = 50_000


def recorded(work: Callable[[], Any]) -> tuple[int, int]:
    """Return the peak of the bytes that some work allocated, and how many of them it left.

    PyTorch's profiler writes down every allocation and every release of tensor storage, also of
    temporaries inside kernels (a convolution's workspace). Their running sum is exact and the
    same in every run; a process's high-water mark is neither, for it depends on what the memory
    allocator of the system keeps back.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    sums = list(itertools.accumulate((e["args"]["Bytes"] for e in memory), initial=0))
    return max(sums), sums[-1]


def transient(contestant: Contestant, clock: Clock) -> float:
    """Return the peak within a step, above what lives on between steps.

    Raises:
        RuntimeError: the step left something behind, so the peak is not what it needs.
    """
    peak, left = recorded(contestant.run)
    if left:
        raise RuntimeError(f"{contestant.name} left {left} bytes more than it found")
    return float(peak)


BYTES = Quantity("bytes", "MB", 1e-6, transient)


def releasing(step: Step, parameters: Iterable[Tensor]) -> Step:
    """Return a step that ends without gradients, so that they count as its own."""
    held = list(parameters)

    def run_step() -> None:
        step()
        for parameter in held:
            parameter.grad = None

    return run_step


def plain_releasing(make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the plain step."""
    net = make_net()
    return releasing(plain_step(net, x, y), net.parameters())


def hand_releasing(name: str, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the step of one method by hand."""
    method = METHODS[name][0](make_net(), NUM_POINTS, SCALE)
    parameters = [*method.locs, *method.rhos, *method.net.parameters()]
    return releasing(hand_step(method, x, y), parameters)


def our_releasing(name: str, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return our step."""
    bnn = make_bnn(make_net(), NUM_POINTS)
    return releasing(our_step(bnn, METHODS[name][1], x, y), bnn.parameters())


def size_of(make_net: Nets, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the bytes of a net's parameters, and of what its forward keeps for the backward."""
    net, kept = make_net(), []
    _, activations = recorded(lambda: kept.append(F.cross_entropy(net(x), y)))
    parameters = sum(p.numel() * p.element_size() for p in net.parameters())
    return {PARAMETERS: parameters / 1e6, ACTIVATIONS: activations / 1e6}


def contestant(
    name: str,
    who: str,
    make: Callable[[], Step],
    sizes: Mapping[str, float],
    plain: str,
    limit: str | None = None,
) -> Contestant:
    """Build one contestant, and note the bytes that it keeps between steps.

    These are parameters, the moments of Adam, and whatever else the step's owner stores.
    """
    built: list[Step] = []

    def build_and_step() -> None:
        built.append(make())
        built[0]()  # the first step makes Adam's moments

    _, kept = recorded(build_and_step)
    facts = {KEPT: kept / 1e6, **sizes}
    return Contestant(name, built[0], who, limit, plain, facts)


def contestants(
    make_net: Nets, x: Tensor, y: Tensor, prefix: str = "", by_hand: bool = True
) -> list[Contestant]:
    """Return the plain step, and both ways of every method or ours only."""
    sizes = size_of(make_net, x, y)
    plain = f"{prefix}plain PyTorch"

    def add(name: str, who: str, make: Callable[[], Step], limit: str | None = None) -> None:
        found.append(contestant(prefix + name, who, make, sizes, plain, limit))

    found: list[Contestant] = []
    add("plain PyTorch", "plain", functools.partial(plain_releasing, make_net, x, y))
    for name in METHODS:
        limit = f"{name}, by hand" if by_hand else None
        if limit is not None:
            add(limit, "by hand", functools.partial(hand_releasing, name, make_net, x, y))
        add(f"{name}, ours", "ours", functools.partial(our_releasing, name, make_net, x, y), limit)
    return found


# --------------------------------------------------------------------------- findings


def over_parameters(found: list[Contestant]) -> Callable[[Numbers], dict[str, float]]:
    """Return each peak less the plain net's activations, over its parameters' bytes."""

    def findings(numbers: Numbers) -> dict[str, float]:
        return {
            f"{c.name}: (peak - activations) / parameters": rounded(
                (numbers[c.name][0] / 1e6 - c.facts[ACTIVATIONS]) / c.facts[PARAMETERS]
            )
            for c in found
        }

    return findings


def growth(found: list[Contestant]) -> Callable[[Numbers], dict[str, float]]:
    """Return, over all sizes, how peaks grow with the net's parameters and activations."""

    def findings(numbers: Numbers) -> dict[str, float]:
        results = {}
        for method in dict.fromkeys(c.name.partition(": ")[2] for c in found):
            rows = [c for c in found if c.name.endswith(f": {method}")]
            sizes = [c.facts[PARAMETERS] + c.facts[ACTIVATIONS] for c in rows]
            peaks = [numbers[c.name][0] / 1e6 for c in rows]
            ratios = [peak / size for peak, size in zip(peaks, sizes, strict=True)]
            found_here = {
                "smallest peak / (parameters + activations)": min(ratios),
                "largest": max(ratios),
                "exponent (1 is linear)": exponent(sizes, peaks),
            }
            results |= {f"{method}: {name}": rounded(v) for name, v in found_here.items()}
        return results

    return findings


def exponent(sizes: list[float], peaks: list[float]) -> float:
    """Return `b` of `peak = a size^b`, by least squares of the logarithms."""
    logs = [[math.log(value) for value in values] for values in (sizes, peaks)]
    return statistics.linear_regression(*logs).slope


def rounded(value: float) -> float:
    """Return four digits."""
    return float(f"{value:.4g}")


# --------------------------------------------------------------------------- cases


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    found = contestants(lambda: mlp(smoke_test), x, y)
    title = "MLP 784-400-400-10, batch 128"
    return Case("mlp", title, "step", 2, found, False, BYTES, over_parameters(found))


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    x, y = images(2 if smoke_test else 32, smoke_test)
    found = contestants(lambda: resnet18(smoke_test), x, y)
    title = "ResNet-18 on 32 x 32 images, batch 32"
    return Case("resnet18", title, "step", 2, found, False, BYTES, over_parameters(found))


def growth_case(smoke_test: bool) -> Case:
    """Return MLPs of growing depth at one width, and of growing width at one depth."""
    sizes = [(256, depth) for depth in (2, 4, 8, 16)] + [(width, 3) for width in (128, 512, 1024)]
    if smoke_test:
        sizes = [(8, 2), (16, 3)]
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    found = []
    for width, depth in sizes:
        make_net = functools.partial(dense, x.shape[1], *[width] * depth, 10)
        found += contestants(make_net, x, y, f"{depth} x {width}: ", by_hand=False)
    title = "MLPs 784-...-10 of depth x width, batch 128"
    return Case("growth", title, "step", 2, found, False, BYTES, growth(found))


if __name__ == "__main__":
    # What the imports made lives on: no collection needs to look at it again.
    gc.collect()
    gc.freeze()
    run(
        "Peak of the bytes allocated within one training step with Adam, above those that live "
        "on between steps, and ratios to the plain step and to the same method by hand.",
        {"mlp": mlp_case, "resnet18": resnet_case, "growth": growth_case},
    )
