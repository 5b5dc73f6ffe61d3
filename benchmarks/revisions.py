"""Time of two checkouts of the library, for what users run, in turns.

`python benchmarks/revisions.py --other ../checkout`: a process of each checkout does the same work,
one after the other in each round. Without `--other` both are this one, which shows the noise.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from pathlib import Path

import torch
from _harness import CLOCKS, Case, Clock, Contestant, Quantity, run

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "training": "Training steps",
    "prediction": "Predictions by draws",
    "laplace": "Laplace, 500 rows, MLP 784-400-400-10",
    "inducing": "Inducing weights, M = 64",
    "binary": "Binary weights",
    "sampling": "Sampling, 200 points, MLP 4-16-1",
}
# A worker measures its own time.
SECONDS = Quantity("seconds", "ms", 1e3, lambda contestant, clock: contestant.run()[clock])


STARTED: list[subprocess.Popen] = []


class Worker:
    """A process that works with the library of one checkout."""

    def __init__(self, checkout: Path, smoke_test: bool) -> None:
        script = Path(__file__).parent / "_revision_worker.py"
        how = ["smoke" if smoke_test else "full", str(torch.get_num_threads())]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout)},
        )
        STARTED.append(self.process)

    def answer(self, *words: str) -> str:
        self.process.stdin.write("\t".join(words) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")

    def seconds(self, case: str, work: str) -> dict[Clock, float]:
        """Do a piece of work of the newest case, and return what it took by each clock."""
        found = map(float, self.answer(case, work).split())
        return dict(zip(CLOCKS.values(), found, strict=True))


@functools.cache
def workers(other: Path, smoke_test: bool) -> tuple[Worker, Worker]:
    return Worker(other, smoke_test), Worker(ROOT, smoke_test)


def make_case(other: Path, name: str, smoke_test: bool) -> Case:
    """Return a case whose contestants are pairs, of the other checkout and of this."""
    pair = workers(other, smoke_test)
    names, _ = (worker.answer(name).split("\t") for worker in pair)
    contestants = []
    for work in names:
        one, two = (functools.partial(worker.seconds, name, work) for worker in pair)
        first = f"{work}, before"
        contestants.append(Contestant(first, one, "plain", plain=first))
        contestants.append(Contestant(f"{work}, after", two, "ours", plain=first))
    return Case(name, CASES[name], "run", 30, contestants, quantity=SECONDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--other", type=Path, default=ROOT)
    given, rest = parser.parse_known_args()
    revision = ["git", "-C", str(given.other), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(revision, capture_output=True, text=True).stdout.strip() or "unknown"
    try:
        run(
            f"Two checkouts, the same work in turns; ratios are to --other, revision {found}.",
            {name: functools.partial(make_case, given.other, name) for name in CASES},
            rest,
        )
    finally:
        for process in STARTED:
            with process:  # waits for its end, and closes its pipes
                process.kill()
