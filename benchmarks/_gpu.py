"""What the benchmarks on a GPU share: its clock, and where the host waits for it."""

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
from _harness import Case, Clock, Contestant, Quantity, buildable
from torch.utils._python_dispatch import TorchDispatchMode

import tyxe

PACKAGE = Path(tyxe.__file__).resolve().parent
ROOT, TORCH = PACKAGE.parent, Path(torch.__file__).resolve().parent
Step = Callable[[], Any]
Makers = dict[str, Callable[[], Contestant]]


def device() -> torch.device:
    """Return the GPU; the CPU where there is none, for smoke tests."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finished(contestant: Contestant, clock: Clock) -> float:
    """Return seconds of wall-clock for a unit, until the device has done the work too."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else nullcontext
    synchronize()
    start = time.perf_counter()
    units = contestant.run()
    synchronize()
    return (time.perf_counter() - start) / (units or 1)


FINISHED = Quantity("seconds", "ms", 1e3, finished)


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


@torch.no_grad()
def forwards(step: Step, count: int) -> None:
    """Repeat a forward."""
    for _ in range(count):
        step()


def reported(name: str, title: str, unit: str, makers: Makers) -> Case:
    """Return the case of what could be built, with errors of the rest and waits of each."""
    found, errors = buildable(makers)
    kind = device().type
    reads = {}
    for contestant in found:
        for _ in range(2):  # what is made once, or captured
            contestant.run()
        # On a CPU, too, the reads can be counted; that they make it wait is a GPU's trouble.
        count = (
            synchronizations if kind == "cuda" else functools.partial(host_reads, device_type=kind)
        )
        reads[f"{contestant.name}: waits"] = listed(count(contestant.run))
    return Case(name, title, unit, 10, found, True, FINISHED, lambda _: {**errors, **reads})
