"""Time of training steps and predictions on a GPU, eager and captured in a CUDA graph."""

from __future__ import annotations

import collections
import functools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _harness import Case, Clock, Contestant, Quantity, buildable, run
from _nets import images, resnet18
from _traced import Handler, Objective
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models import resnet50
from training_step import HANDLERS, make_bnn, our_step

import tyxe

NUM_POINTS, DRAWS = 50_000, 32
PACKAGE = Path(tyxe.__file__).resolve().parent
ROOT, TORCH = PACKAGE.parent, Path(torch.__file__).resolve().parent
Step = Callable[[], Any]
Nets = Callable[[], nn.Module]


def device() -> torch.device:
    """Return the GPU; the CPU where there is none, for smoke tests."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished(contestant: Contestant, clock: Clock) -> float:
    """Return seconds of wall-clock until the device has done the work, too."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
    synchronize()
    start = time.perf_counter()
    contestant.run()
    synchronize()
    return time.perf_counter() - start


FINISHED = Quantity("seconds", "ms", 1e3, finished)


def captured(step: Step) -> Step:
    """Record a step's kernels once, and return their replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # allocations and the optimiser's state are made outside of the graph
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: Step = step) -> None:  # which keeps the tensors that the graph reads and writes
        graph.replay()

    return replay


# --------------------------------------------------------------------------- host reads


class HostReads(TorchDispatchMode):
    """Count the places of our code at which Python waits for a number of a tensor."""

    # `item`, `bool`, `int`, `float`; and shapes that depend on values.
    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.places: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a read, and do it."""
        if func.overloadpacket.__name__ in self.READS and args[0].device.type == self.device_type:
            self.places[place(traceback.extract_stack()[:-1])] += 1
        return func(*args, **(kwargs or {}))


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return the innermost line of the library in a stack, or the innermost outside of PyTorch."""
    located = [(Path(frame.filename).resolve(), frame.lineno) for frame in frames]
    ours = [(path.relative_to(ROOT), line) for path, line in located if PACKAGE in path.parents]
    others = [(Path(path.name), line) for path, line in located if TORCH not in path.parents]
    path, line = (ours or others)[-1]
    return f"{path.as_posix()}:{line}"


def host_reads(step: Step, device_type: str) -> collections.Counter[str]:
    """Return how often each place reads a number off the device in one step."""
    with HostReads(device_type) as reads:
        step()
    return reads.places


def synchronizations(step: Step) -> collections.Counter[str]:
    """Return how often each place made the host wait in one step, as CUDA's debug mode says."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        return waits(step)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def waits(step: Step) -> collections.Counter[str]:
    """Count a step's warnings of synchronising operations by place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return collections.Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchronizing" in str(warning.message)
    )


def listed(places: collections.Counter[str]) -> str:
    """Return places with their counts in one line."""
    return ", ".join(f"{name} ({count})" for name, count in places.most_common()) or "none"


# --------------------------------------------------------------------------- steps


def adam(parameters: Iterable[Tensor]) -> torch.optim.Adam:
    """Return the optimiser of all contestants, which a graph can capture on a GPU."""
    on_gpu = device().type == "cuda"
    return torch.optim.Adam(parameters, lr=1e-3, fused=True, capturable=on_gpu)


def plain(make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the plain step."""
    net = make_net().to(device())
    optimizer = adam(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def ours(handler: Handler, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return the step of `bnn.fit`, which checks that loss and gradient are finite."""
    return our_step(make_bnn(make_net().to(device()), NUM_POINTS), handler, x, y)


def objective_step(handler: Handler, make_net: Nets, x: Tensor, y: Tensor) -> Step:
    """Return a step on the same objective without that check."""
    bnn = make_bnn(make_net().to(device()), NUM_POINTS)
    bnn.train()
    objective = Objective(bnn, handler)
    optimizer = adam(p for p in bnn.parameters() if p.requires_grad)

    def step() -> None:
        optimizer.zero_grad()
        objective(x, y).backward()
        optimizer.step()

    return step


def contestant(
    name: str,
    who: str,
    build: Callable[..., Step],
    *arguments: Any,
    capture: bool = False,
    plain: str | None = None,
) -> Contestant:
    """Build one contestant, and make a run of it."""
    step = build(*arguments)
    if capture:
        step = captured(step)
    step()

    def run_once() -> None:
        step()

    return Contestant(name, run_once, who, plain=plain)


Makers = dict[str, Callable[[], Contestant]]


def add(makers: Makers, name: str, who: str, build: Callable[..., Step], *arguments: Any) -> None:
    """Add a contestant; on a GPU a captured one, whose ratio is to the captured plain one."""
    makers[name] = functools.partial(contestant, name, who, build, *arguments)
    if device().type == "cuda":
        makers[f"{name}, captured"] = functools.partial(
            contestant,
            f"{name}, captured",
            who,
            build,
            *arguments,
            capture=True,
            plain="plain PyTorch, captured",
        )


def step_case(name: str, title: str, make_net: Nets, x: Tensor, y: Tensor) -> Case:
    """Return steps of the plain net and of every method, with their reads by the host."""
    makers: Makers = {}
    add(makers, "plain PyTorch", "plain", plain, make_net, x, y)
    for method, handler in HANDLERS.items():
        makers[f"{method}, ours"] = functools.partial(
            contestant, f"{method}, ours", "ours", ours, handler, make_net, x, y
        )
        objective = f"{method}, objective only"
        add(makers, objective, "ours", objective_step, handler, make_net, x, y)
    return reported(name, title, "step", makers)


def reported(name: str, title: str, unit: str, makers: Makers) -> Case:
    """Return the case of what could be built, with errors of the rest and waits of each."""
    found, errors = buildable(makers)
    # On a CPU, too, the reads can be counted; that they make it wait is a GPU's trouble.
    kind = device().type
    # What is captured reads nothing in Python, and is not to be replayed in another mode.
    eager = [c for c in found if not c.name.endswith(", captured")]
    reads = {f"{c.name}: reads": listed(host_reads(c.run, kind)) for c in eager}
    if kind == "cuda":
        reads |= {f"{c.name}: waits": listed(synchronizations(c.run)) for c in found}
    return Case(name, title, unit, 20, found, True, FINISHED, lambda _: {**errors, **reads})


# --------------------------------------------------------------------------- prediction


@torch.no_grad()
def forwards(step: Step, count: int) -> None:
    """Repeat a forward."""
    for _ in range(count):
        step()


def plain_forward(make_net: Nets, x: Tensor) -> Step:
    """Return one forward of the plain net."""
    net = make_net().to(device()).eval()
    return torch.no_grad()(lambda: net(x))


def drawn_forward(make_net: Nets, x: Tensor) -> Step:
    """Return one forward with a draw of all weights."""
    bnn = make_bnn(make_net().to(device()), NUM_POINTS).eval()
    return torch.no_grad()(lambda: bnn._run_net(bnn._one_draw(), x))


def repeated(build: Callable[..., Step], capture: bool, count: int, *arguments: Any) -> Step:
    """Return many runs of what was built or captured once."""
    step = captured(build(*arguments)) if capture else build(*arguments)
    return functools.partial(forwards, step, count)


def prediction(vectorize: bool, count: int, make_net: Nets, x: Tensor) -> Step:
    """Return `bnn.predict`."""
    bnn = make_bnn(make_net().to(device()), NUM_POINTS)
    return lambda: bnn.predict(x, num_predictions=count, vectorize=vectorize)


def predict_case(name: str, title: str, make_net: Nets, x: Tensor, count: int) -> Case:
    """Return forwards of the plain net, and predictions by a loop, by vmap and by replays."""
    makers: Makers = {}
    forward = {
        "plain PyTorch": ("plain", plain_forward),
        "draws in a loop": ("ours", drawn_forward),
    }
    captures = (False, True) if device().type == "cuda" else (False,)
    for capture in captures:
        suffix = ", captured" if capture else ""
        reference = f"plain PyTorch{suffix}" if capture else None
        for kind, (who, build) in forward.items():
            full = f"{kind}{suffix}"
            makers[full] = functools.partial(
                contestant, full, who, repeated, build, capture, count, make_net, x, plain=reference
            )
    for vectorize in (False, True):
        full = f"predict(vectorize={vectorize}), ours"
        makers[full] = functools.partial(
            contestant, full, "ours", prediction, vectorize, count, make_net, x
        )
    return reported(name, title, f"{count} draws", makers)


# --------------------------------------------------------------------------- cases


def data(smoke_test: bool, count: int, side: int) -> tuple[Tensor, Tensor]:
    """Return random images of ten classes on the device."""
    x, y = images(2, True) if smoke_test else (torch.randn(count, 3, side, side), None)
    labels = torch.randint(10, (len(x),)) if y is None else y
    return x.to(device()), labels.to(device())


NETS: dict[str, tuple[str, Nets, int, int]] = {
    "resnet18": ("ResNet-18 on 32 x 32 images, batch 128", resnet18, 128, 32),
    "resnet50": ("ResNet-50 on 224 x 224 images, batch 64", resnet50, 64, 224),
}


def make_case(net: str, what: str, smoke_test: bool) -> Case:
    """Return one net's steps or predictions."""
    title, make_net, count, side = NETS[net]
    if smoke_test:
        make_net = functools.partial(resnet18, True)
    x, y = data(smoke_test, count, side)
    if what == "step":
        return step_case(f"{net}_step", title, make_net, x, y)
    draws = 3 if smoke_test else DRAWS
    return predict_case(f"{net}_predict", f"{title}, {draws} draws", make_net, x, draws)


if __name__ == "__main__":
    import sys

    if not torch.cuda.is_available() and "--smoke-test" not in sys.argv:
        print("benchmarks/gpu.py: no CUDA device here, so nothing was measured")
        sys.exit(0)
    run(
        "Seconds of training steps and predictions on a GPU, and ratios to the plain net that "
        "runs eagerly or captured, as the contestant does.",
        {
            f"{net}_{what}": functools.partial(make_case, net, what)
            for net in NETS
            for what in ("step", "predict")
        },
    )
