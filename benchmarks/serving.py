"""Time of requests to a server: the BNN's predict, and its ensemble, plain, exported, compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _harness import Case, Contestant, run
from _nets import images, mlp, resnet18, vectors
from torch import Tensor, nn
from training_step import make_bnn

NUM_DRAWS = 8
THREADS = (1, 2, 8)
Request = Callable[[], object]


def servants(net: nn.Module, x: Tensor, compiled: bool, **rules: Any) -> dict[str, Request]:
    """Return ways to answer one request; in closed form too where rules choose a last layer."""
    bnn = make_bnn(net.eval(), num_points=60_000, **rules)
    ensemble = bnn.to_ensemble(NUM_DRAWS)
    ensemble(x)  # which finds out whether all draws may be one pass

    def of(module: Callable[[Tensor], object]) -> Request:
        def request() -> object:
            with torch.inference_mode():
                return module(x)

        return request

    found = {
        "the plain net, once": of(net),
        "predict": functools.partial(bnn.predict, x, num_predictions=NUM_DRAWS),
        "to_ensemble": of(ensemble),
        "to_ensemble, exported": of(torch.export.export(ensemble, (x,)).module()),
    }
    if rules:
        found["to_ensemble, closed form"] = of(bnn.to_ensemble(closed_form=True))
    if compiled:
        found["to_ensemble, compiled"] = of(torch.compile(ensemble))
    return found


def who(way: str) -> str:
    return "plain" if "plain" in way else "ours"


def repeated(request: Request, count: int) -> Callable[[], int]:
    """Return so many requests, one after the other."""

    def work() -> int:
        for _ in range(count):
            request()
        return count

    return work


def latency_case(name: str, title: str, make: Callable[[bool], nn.Module], smoke: bool) -> Case:
    """Return the case of one request at a time."""
    x = vectors(1, smoke)[0] if name == "mlp" else images(1, smoke)[0]
    requests = servants(make(smoke), x, name == "mlp" and not smoke)
    count = 2 if smoke else 20 if name == "mlp" else 1

    found = [Contestant(way, repeated(r, count), who(way)) for way, r in requests.items()]
    return Case(name, f"{title}, one request at a time, {NUM_DRAWS} draws", "request", 15, found)


def last_layer_case(smoke: bool) -> Case:
    """Return the case of a posterior over the last layer, whose body all draws share."""
    x, _ = images(2 if smoke else 64, smoke)
    net = resnet18(smoke)
    *_, head = (part for part in net.modules() if isinstance(part, nn.Linear))
    requests = servants(net, x, compiled=False, expose_modules=[head])
    found = [Contestant(way, repeated(r, 1), who(way)) for way, r in requests.items()]
    title = f"Last layer of ResNet-18, a request of {len(x)} images, {NUM_DRAWS} draws"
    return Case("last_layer", title, "request", 5, found)


def threads_case(smoke: bool) -> Case:
    """Return the case of many requests by several threads."""
    x, _ = vectors(2 if smoke else 128, smoke)
    requests = servants(mlp(smoke), x, compiled=False)
    count = 4 if smoke else 64

    def by_threads(threads: int, request: Request) -> Callable[[], int]:
        def work() -> int:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda _: request(), range(count)))
            return count

        return work

    ways = ["the plain net, once", "predict", "to_ensemble"]
    found = [
        Contestant(f"{way}, threads: {n}", by_threads(n, requests[way]), who(way))
        for way, n in itertools.product(ways, THREADS)
    ]
    title = "MLP 784-400-400-10, requests of 128 rows by threads of a server"
    return Case("threads", title, "request", 15, found)


if __name__ == "__main__":
    run(
        "Seconds of a request. Start it with --threads 1, as servers with threads of their own do.",
        {
            "mlp": functools.partial(latency_case, "mlp", "MLP 784-400-400-10", mlp),
            "resnet18": functools.partial(latency_case, "resnet18", "ResNet-18", resnet18),
            "last_layer": last_layer_case,
            "threads": threads_case,
        },
    )
