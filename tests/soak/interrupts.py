"""SIGINT in all that a BNN does, at random moments and at random calls, and what it leaves."""

from __future__ import annotations

import collections
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.poutine import runtime

import tyxe
from tests.soak.subjects import SUBJECTS, Subject, centre_of, digest, subject
from tyxe import files
from tyxe.bnn.rerun import Resting
from tyxe.linalg import checks
from tyxe.threads import INTERRUPTS

__all__ = ["HOW", "run"]

HOW = ("time", "any", "edges")

_CALLS = ("call", "c_return")  # after these, Python lets a signal's handler run
_EDGES = ("__enter__", "__exit__", "__init__")


class _Counter:
    """Counts the moments at which Python may run a signal's handler, and sends one at the n-th.

    With `edges`, they are those where something is entered or left.
    """

    def __init__(self, edges: bool, at: int = -1) -> None:
        self.edges, self.count, self.at = edges, 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in _CALLS and (not self.edges or frame.f_code.co_name in _EDGES):
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)


@contextmanager
def _watched(counter: _Counter) -> Iterator[None]:
    sys.setprofile(counter)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _timer(after: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _settings() -> dict[str, Any]:
    """Return what belongs to the process or the thread, and is changed while a BNN runs."""
    return {
        "Pyro's handlers": len(runtime._PYRO_STACK),
        "plates": [name for name in runtime._DIM_ALLOCATOR._stack if name is not None],
        "Pyro's settings": pyro.settings.get(),
        "PyTorch's validation": torch.distributions.Distribution._validate_args,
        "unchecked numbers": checks._THREAD.unchecked,
        "gradients": torch.is_grad_enabled(),
        "modes of functions": torch._C._len_torch_function_stack(),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "torch.func": torch._C._functorch.peek_interpreter_stack(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "default type": torch.get_default_dtype(),
    }


def _in_thread(call: Callable[[], Any]) -> str | None:
    """Run a call in another thread; return what went wrong."""
    problems: list[str | None] = []

    def work() -> None:
        try:
            call()
            problems.append(None)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    return problems[0] if problems else "it waits for ever"


class _Before:
    """What a subject was before a call was stopped."""

    def __init__(self, subject: Subject) -> None:
        self.settings, self.subject = _settings(), subject
        bnn = subject.bnn
        self.modes = [module.training for module in bnn.modules()]
        self.gradients = {name: p.requires_grad for name, p in bnn.named_parameters()}
        self.centre, self.state = centre_of(bnn), digest(bnn.state_dict())

    def changed(self, call: str) -> list[str]:
        """Return what a stopped call has left behind."""
        bnn = self.subject.bnn
        now = _settings()
        found = [name for name, value in self.settings.items() if now[name] != value]
        if [module.training for module in bnn.modules()] != self.modes:
            found.append("modes")
        if {name: p.requires_grad for name, p in bnn.named_parameters()} != self.gradients:
            found.append("frozen parameters")
        if any(type(held) is not Resting for held in bnn.in_places().values()):
            found.append("draws in the net")
        if call == "load" and digest(bnn.state_dict()) not in (self.state, self._in_file()):
            found.append("half of a state")
        if torch.equal(torch.rand(4), torch.rand(4)):
            found.append("generator")
        # In another thread: neither the lock nor the mark of a fit may be left.
        problem = _in_thread(lambda: found.extend(self._of_centre(call)))
        problem = problem or _in_thread(self.subject.calls["fit"])
        if problem is not None:
            found.append(f"in another thread: {problem}")
        return found

    def _in_file(self) -> str:
        content = files.read(self.subject.file)["content"]
        return digest(content.get("bnn", content))

    def restore(self) -> None:
        """Set back what belongs to the process, so that one leak is counted once."""
        torch.set_grad_enabled(True)
        runtime._PYRO_STACK[:] = []
        INTERRUPTS.__init__()
        signal.signal(signal.SIGINT, self.settings["handler of SIGINT"])

    def _of_centre(self, call: str) -> list[str]:
        centre = centre_of(self.subject.bnn)
        if call in self.subject.keeping and not torch.equal(centre, self.centre):
            return ["the prediction"]
        return [] if centre.isfinite().all() else ["a prediction that is not finite"]


def stopped(call: Callable[[], Any], by: Any) -> bool:
    """Run a call until it ends or an interrupt stops it; say whether one did."""
    try:
        with by:
            call()
    except KeyboardInterrupt:
        return True
    return False


class _Stops:
    """Chooses when a subject's call is stopped: after a time, or at a call of a function in it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        start = time.perf_counter()
        call()
        self._seconds = time.perf_counter() - start
        self._moments = {}
        for edges in (False, True):
            counter = _Counter(edges)
            with _watched(counter):
                call()
            self._moments[edges] = counter.count

    def choose(self, how: str, part: float) -> Any:
        """Return a context that sends an interrupt after a part of the call."""
        if how == "time":
            return _timer(max(1e-5, part * self._seconds))
        edges = how == "edges"
        return _watched(_Counter(edges, 1 + int(part * self._moments[edges])))


def run(count: int, seed: int) -> dict[str, int]:
    """Stop so many calls, at random times, at random calls of functions, and where things are left.

    `left behind` counts the stops after which anything was; what it was is listed too.
    """
    chance, found = random.Random(seed), collections.Counter[str]({"left behind": 0})
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)
        subjects = {name: subject(name, Path(folder)) for name in SUBJECTS}
        pairs = [(name, call) for name, one in subjects.items() for call in one.calls]
        stops = {(name, call): _Stops(subjects[name].calls[call]) for name, call in pairs}
        while found["interrupts"] < count:
            name, call = pair = pairs[found["calls"] % len(pairs)]
            how = HOW[found["calls"] // len(pairs) % len(HOW)]
            before = _Before(subjects[name])
            by = stops[pair].choose(how, chance.random())
            found["calls"] += 1
            if not stopped(subjects[name].calls[call], by):
                continue  # it had ended
            found["interrupts"] += 1
            left = before.changed(call)
            found["left behind"] += bool(left)
            found.update(f"{name}.{call}: {what}" for what in left)
            if left:
                before.restore()
                subjects[name] = subject(name, Path(folder))
    return dict(found)
