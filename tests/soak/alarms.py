"""Signals that raise at random moments of fits and predictions: what is left half done."""

from __future__ import annotations

import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from tqdm.auto import tqdm

from tests.soak.subjects import ADAM, BATCHES, SUBJECTS, X, digest
from tyxe.errors import UNREAD
from tyxe.poutine import local_reparameterization
from tyxe.threads import as_before, exclusive, handlers


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
        "forward-mode derivatives": torch.autograd.forward_ad._current_level >= 0,
        "a function transform": torch._C._functorch.peek_interpreter_stack() is not None,
    }
    return [what for what, is_so in wrong.items() if is_so]


def _works(bnns: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    laplace, variational = bnns["LaplaceBNN"], bnns["VariationalBNN"]
    laplace.fit_curvature(BATCHES)
    other = SUBJECTS["LaplaceBNN"]()  # a fit that is stopped has no curvature
    trained = [p for p in variational.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-3)

    def fit() -> None:
        with local_reparameterization():
            variational.fit(BATCHES, optimizer, 2, progress=False)

    return {
        "fit": fit,
        "fit anew": lambda: other.fit(BATCHES, ADAM, 1, progress=False),
        "curvature": lambda: laplace.fit_curvature(BATCHES),
        "predict": lambda: variational.predict(X, num_predictions=32, batch_size=2),
        "evaluate": lambda: laplace.evaluate(BATCHES, num_predictions=4),
        "hold": lambda: bnns["PytorchBNN"].predict(X, num_predictions=16),
    }


def _states(bnns: dict[str, Any]) -> dict[str, Any]:
    """Return each BNN's weights and modes."""
    return {
        name: (digest(bnn.state_dict()), [part.training for part in bnn.modules()])
        for name, bnn in bnns.items()
    }


def _changed(before: dict[str, Any], after: dict[str, Any], fits: bool) -> list[str]:
    """Say which BNNs are in other modes, or have other weights although nothing was fitted."""
    found = [f"other modes of {name}" for name in before if before[name][1] != after[name][1]]
    if not fits:
        found += [f"other weights of {n}" for n in before if before[n][0] != after[n][0]]
    return found


@as_before()  # what is left behind belongs to this run alone
def run(count: int, seed: int = 0) -> dict[str, Any]:
    """Stop pieces of work at random moments, and return how often, and what was left behind."""
    chance, found, stopped = random.Random(seed), list[str](), 0
    # tqdm's own lock, in Python, may not be left free by a signal.
    bars, tqdm._lock = getattr(tqdm, "_lock", None), threading.RLock()
    with warnings.catch_warnings(), swallowed():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        bnns = {name: make().eval() for name, make in SUBJECTS.items() if name != "MCMC_BNN"}
        works = _works(bnns)
        for work in works.values():
            work()
        settings = pyro.settings.get()
        for index in range(count):
            name, error = chance.choice([*works]), chance.choice([KeyboardInterrupt, Alarm])
            before = _states(bnns)
            try:
                with alarm(chance.uniform(2e-4, 8e-3), error):
                    works[name]()
            except error:
                stopped += 1
            left = left_behind(settings)
            left += _changed(before, _states(bnns), name in ("fit", "fit anew", "curvature"))
            found += [f"{index}, {name}: {what}" for what in left]
        if not is_free():
            found.append("the lock is never free again")
        with ThreadPoolExecutor(1) as pool:  # all has to go on, in another thread as well
            for work in works.values():
                pool.submit(work).result(60)
        if not all(p.isfinite().all() for bnn in bnns.values() for p in bnn.parameters()):
            found.append("weights that are not finite")
    tqdm._lock = bars
    return {"seed": seed, "alarms": count, "stopped": stopped, "left": len(found), "found": found}
