"""Sixteen threads that use every wrapper at once: the numbers of one thread, and nothing left.

`run(count, seed)` makes `count` calls in each thread, `sys.setswitchinterval` being tiny.
"""

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
from torch import Tensor

from tests.soak.fuzz import process_state
from tests.soak.subjects import SUBJECTS, X, Y, fitted
from tests.soak.uses import equal

THREADS = 16

Job = Callable[[Any], Any]

# Without draws: the same to the bit in every thread.
EXACT: dict[str, Job] = {
    "centre": lambda bnn: bnn.predict(X, num_predictions=0),
    "centre, cut": lambda bnn: bnn.predict(X, num_predictions=0, batch_size=5),
    "scores": lambda bnn: bnn.evaluate(X, Y, num_predictions=0),
    "module": lambda bnn: bnn.to_module()(X).detach(),
}
# With draws: finite, and of the shape that one thread gets.
DRAWN: dict[str, Job] = {
    "draws": lambda bnn: bnn.predict(X, num_predictions=3),
    "draws, apart": lambda bnn: bnn.predict(X, num_predictions=2, aggregate=False),
    "draws, at once": lambda bnn: bnn.predict(X, num_predictions=2, vectorize=True),
    "scores of draws": lambda bnn: bnn.evaluate(X, Y, num_predictions=2, reduction="none"),
    "samples": lambda bnn: bnn.sample_predictive(X, num_samples=2),
    "forward": lambda bnn: bnn(X).detach(),
    "module of a draw": lambda bnn: bnn.to_module(sample=True)(X).detach(),
}


class Subject:
    """A BNN, its data, and what one thread gets from each call."""

    def __init__(self, wrapper: str) -> None:
        self.wrapper = wrapper
        # In train mode, a forward of the user's changes the statistics of norms.
        self.bnn = fitted(wrapper).eval()
        self.jobs = EXACT | DRAWN
        if wrapper == "PytorchBNN":  # which has no likelihood
            self.jobs = {
                n: self.jobs[n] for n in ("module", "draws", "forward", "module of a draw")
            }
        self.expected = {name: job(self.bnn) for name, job in self.jobs.items()}
        self.before = self.state()

    def state(self) -> dict[str, Any]:
        """Return what no call may change: tensors, modes, and what is in the sites' places."""
        tensors = {n: v for n, v in self.bnn.state_dict().items() if isinstance(v, Tensor)}
        places = {name: id(value) for name, value in self.bnn._in_places().items()}
        modes = [part.training for part in self.bnn.modules()]
        return {"tensors": {n: v.clone() for n, v in tensors.items()}, "of": (places, modes)}

    def call(self, name: str) -> str | None:
        """Make a call, and say what is wrong with what it returns."""
        found, expected = self.jobs[name](self.bnn), self.expected[name]
        if name in EXACT:
            return None if equal(found, expected) else "differs from that of one thread"
        pairs = list(zip(_flat(found), _flat(expected), strict=True))
        if any(one.shape != other.shape for one, other in pairs):
            return f"has shapes {[tuple(one.shape) for one, _ in pairs]}"
        return None if all(bool(one.isfinite().all()) for one, _ in pairs) else "is not finite"

    def left_behind(self) -> list[str]:
        """Return what the calls have changed."""
        now = self.state()
        changed = [n for n, v in self.before["tensors"].items() if not equal(v, now["tensors"][n])]
        if now["of"] != self.before["of"]:
            changed.append("places or modes")
        return [f"{self.wrapper}: changed {name}" for name in changed]


def _flat(values: Any) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


@contextmanager
def _restless() -> Iterator[None]:
    """Let Python switch threads as often as it can, and keep warnings out."""
    before = sys.getswitchinterval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setswitchinterval(1e-6)
        try:
            yield
        finally:
            sys.setswitchinterval(before)


def run(count: int, seed: int = 0, threads: int = THREADS) -> dict[str, Any]:
    """Make `count` calls in each thread for each wrapper, and return their number and the faults.

    Every second thread uses a BNN of its own kind that it shares with the others, the rest one of
    all kinds at random, so that both one BNN and several are used at once.
    """
    pyro.set_rng_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subjects = [Subject(wrapper) for wrapper in SUBJECTS for _ in range(2)]
    before, found, calls = process_state(), [], 0
    lock, start = threading.Lock(), threading.Barrier(threads)

    def work(number: int) -> None:
        nonlocal calls
        chosen = random.Random(f"{seed}/{number}")
        start.wait()
        for step in range(count * len(SUBJECTS)):
            own = subjects[2 * (step % len(SUBJECTS))]
            subject = own if number % 2 else chosen.choice(subjects)
            name = chosen.choice(list(subject.expected))
            try:
                fault = subject.call(name)
            except Exception as error:
                fault = f"raised {type(error).__name__}: {error}"
            with lock:
                calls += 1
                if fault:
                    found.append(f"{subject.wrapper}, {name}: {fault}")

    with _restless():
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    after = process_state()
    found += [f"left behind: {name}" for name in before if before[name] != after[name]]
    found += [line for subject in subjects for line in subject.left_behind()]
    return {"seed": seed, "threads": threads, "calls": calls, "faults": len(found), "found": found}
