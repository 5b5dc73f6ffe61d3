"""What every benchmark does: interleave contestants, summarise, write JSON.

All contestants of a case run in turns (A B C A B C ...), so that whatever else the machine does
falls on all of them. A ratio is taken within each round; its median and quartiles are over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch

import tyxe

SEED = 0
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Contestant:
    """One way of doing the case's work.

    Attributes:
        name: as the tables show it.
        run: does the work once; may return how many units of it (leapfrog steps) that was.
        who: `plain`, `by hand`, `ours` or a peer's name.
        limit: name of the contestant that does the same without the library.
    """

    name: str
    run: Callable[[], int | None]
    who: str
    limit: str | None = None


@dataclass(frozen=True)
class Case:
    """Contestants that are compared; all ratios are to the first and to their own limits.

    `warm_up` runs a round that is not counted; it is left out where one run does its work dozens
    of times and takes minutes.
    """

    name: str
    title: str
    unit: str
    repeats: int
    contestants: list[Contestant]
    warm_up: bool = True


def options(description: str) -> argparse.Namespace:
    """Parse the command line that all benchmarks share, and seed torch."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="where the results go; printed only without it")
    parser.add_argument("--repeats", type=int, help="rounds of every case (default: by case)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--keep-memory",
        action="store_true",
        help="tell glibc not to give freed memory back to the system between steps",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor time, for one thread on a machine that others use too",
    )
    parser.add_argument("--case", help="run only the case of this name")
    parser.add_argument("--smoke-test", action="store_true", help="tiny sizes, two rounds")
    parsed = parser.parse_args()
    if parsed.keep_memory:
        keep_memory()
    torch.set_num_threads(parsed.threads)
    pyro.set_rng_seed(parsed.seed)
    # The bound is not what is looked at here, and a few steps leave it far from the data.
    warnings.filterwarnings("ignore", category=tyxe.TyxeWarning)
    return parsed


def keep_memory() -> None:
    """Switch off trimming and mmap in glibc's malloc.

    By default it hands tensors of a megabyte back as soon as they are freed, so that the next
    step pays for their pages anew: up to a third of the plain MLP step, more or less by luck of
    the order in which tensors die.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4
    if not (libc.mallopt(m_trim_threshold, -1) and libc.mallopt(m_mmap_max, 0)):
        raise SystemExit("--keep-memory needs glibc's mallopt")


def timed(contestant: Contestant, clock: Clock) -> float:
    """Return seconds per unit of one run."""
    start = clock()
    units = contestant.run()
    return (clock() - start) / (units or 1)


def interleaved(
    contestants: list[Contestant],
    repeats: int,
    warm_up: bool = True,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Run all contestants in turns; a round before may warm up."""
    for contestant in contestants if warm_up else ():
        contestant.run()
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            seconds[contestant.name].append(timed(contestant, clock))
    return seconds


def summary(numbers: Iterable[float]) -> dict[str, float]:
    """Return median and quartiles, to four digits."""
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return {
        key: float(f"{value:.4g}") for key, value in (("median", middle), ("q1", low), ("q3", high))
    }


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> dict[str, float]:
    """Return the summary of a contestant's time over a reference's, round by round."""
    pairs = zip(seconds[name], seconds[reference], strict=True)
    return summary(own / other for own, other in pairs)


def measured(case: Case, repeats: int, clock: Clock) -> dict[str, Any]:
    """Run one case and return its part of the results."""
    seconds = interleaved(case.contestants, repeats, case.warm_up, clock)
    plain = case.contestants[0].name
    rows = []
    for contestant in case.contestants:
        row: dict[str, Any] = {"name": contestant.name, "who": contestant.who}
        row["seconds"] = summary(seconds[contestant.name])
        row["to_plain"] = ratio(seconds, contestant.name, plain)
        if contestant.limit is not None:
            row["limit"] = contestant.limit
            row["to_limit"] = ratio(seconds, contestant.name, contestant.limit)
        rows.append(row)
    return {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "repeats": repeats,
        "contestants": rows,
    }


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def environment(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return machine, versions, threads, seed, date and command."""
    return {
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyro": pyro.__version__,
            "tyxe": tyxe.__version__,
        },
        "threads": torch.get_num_threads(),
        "clock": parsed.clock,
        "keep_memory": parsed.keep_memory,
        "seed": parsed.seed,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
        "smoke_test": parsed.smoke_test,
    }


def run(description: str, make_cases: dict[str, Callable[[bool], Case]]) -> None:
    """Run a benchmark from the command line.

    Args:
        description: what is measured.
        make_cases: builds each case, given whether it is a smoke test. Built one at a time, so
            that the memory of one is free again for the next.
    """
    parsed = options(description)
    if parsed.case is not None and parsed.case not in make_cases:
        raise SystemExit(f"--case is {parsed.case!r}; the cases are {', '.join(make_cases)}")
    cases = []
    for name, make in make_cases.items():
        if parsed.case in (None, name):
            case = make(parsed.smoke_test)
            repeats = parsed.repeats or (2 if parsed.smoke_test else case.repeats)
            cases.append(measured(case, repeats, CLOCKS[parsed.clock]))
            if parsed.smoke_test:
                cases[-1]["title"] += " (smoke test: tiny sizes)"
            show(cases[-1])
    results = {
        "benchmark": Path(sys.argv[0]).stem,
        "description": description,
        "environment": environment(parsed),
        "cases": cases,
    }
    if parsed.json is not None:
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        parsed.json.write_text(json.dumps(results, indent=1) + "\n")


def show(case: dict[str, Any]) -> None:
    """Print one case's results."""
    print(f"{case['title']} ({case['repeats']} rounds)")
    for row in case["contestants"]:
        line = f"  {row['name']:44s} {1e3 * row['seconds']['median']:10.3f} ms"
        line += f" {row['to_plain']['median']:8.2f} x plain"
        if "to_limit" in row:
            line += f" {row['to_limit']['median']:6.2f} x its limit"
        print(line, flush=True)
