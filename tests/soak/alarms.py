"""Signals that raise at random moments of fits and predictions: what is left half done."""

from __future__ import annotations

import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from tqdm.auto import tqdm

from tests.soak.subjects import ADAM, BATCHES, SUBJECTS, X
from tyxe.errors import UNREAD
from tyxe.threads import exclusive, handlers


class Alarm(Exception):
    """What a handler of SIGALRM raises, such as that of a test's time-out."""


@contextmanager
def alarm(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raise an error somewhere inside after some seconds, or not at all if that is left before."""

    def raises(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def swallowed() -> Iterator[None]:
    """Allow that Python drops an alarm, as it does with an error of what the collector calls.

    Such are the callbacks of other packages in `gc.callbacks`. All else is still reported.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type not in (KeyboardInterrupt, Alarm):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def is_free() -> bool:
    """Whether another thread can take the lock."""
    found = []

    def take() -> None:
        with exclusive():
            found.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(10)
    return bool(found)


def left_behind(settings: dict[str, Any]) -> list[str]:
    """Say what a signal has left behind in this thread and process."""
    wrong = {
        "the lock is held": exclusive()._is_owned(),
        "a handler is active": bool(handlers()),
        "other settings of Pyro's": pyro.settings.get() != settings,
        "a stream of random numbers": bool(torch._C._len_torch_dispatch_stack()),
        "numbers are not checked": UNREAD.get(),
        "gradients are not recorded": not torch.is_grad_enabled(),
    }
    return [what for what, is_so in wrong.items() if is_so]


def _works() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    bnns = {name: make() for name, make in SUBJECTS.items() if name != "MCMC_BNN"}
    laplace, variational = bnns["LaplaceBNN"], bnns["VariationalBNN"]
    laplace.fit_curvature(BATCHES)
    other = SUBJECTS["LaplaceBNN"]()  # a fit that is stopped has no curvature
    trained = [p for p in variational.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    return {
        "fit": lambda: variational.fit(BATCHES, optimizer, 2, progress=False),
        "fit anew": lambda: other.fit(BATCHES, ADAM, 1, progress=False),
        "curvature": lambda: laplace.fit_curvature(BATCHES),
        "predict": lambda: variational.predict(X, num_predictions=32, batch_size=2),
        "evaluate": lambda: laplace.evaluate(BATCHES, num_predictions=4),
        "hold": lambda: bnns["PytorchBNN"].predict(X, num_predictions=16),
    }


def run(count: int, seed: int = 0) -> dict[str, Any]:
    """Stop pieces of work at random moments, and return how often, and what was left behind."""
    chance, found, stopped = random.Random(seed), list[str](), 0
    # tqdm's own lock, in Python, may not be left free by a signal.
    before, tqdm._lock = getattr(tqdm, "_lock", None), threading.RLock()
    with warnings.catch_warnings(), swallowed():
        warnings.simplefilter("ignore")
        works = _works()
        for work in works.values():
            work()
        settings = pyro.settings.get()
        for index in range(count):
            name, error = chance.choice([*works]), chance.choice([KeyboardInterrupt, Alarm])
            try:
                with alarm(chance.uniform(2e-4, 8e-3), error):
                    works[name]()
            except error:
                stopped += 1
            found += [f"{index}, {name}: {what}" for what in left_behind(settings)]
        if not is_free():
            found.append("the lock is never free again")
        for work in works.values():  # which has to go on
            work()
    tqdm._lock = before
    return {"seed": seed, "alarms": count, "stopped": stopped, "left": len(found), "found": found}
