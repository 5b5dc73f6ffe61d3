"""What every benchmark does: interleave contestants, summarise, write JSON.

All contestants of a case run in turns (A B C A B C ...), so that whatever else the machine does
falls on all of them. A ratio is taken within each round; its median and quartiles are over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyro
import torch

import tyxe

SEED = 0
Clock = Callable[[], float]


def processor_time() -> float:
    """Return processor seconds of this process and of its finished children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": processor_time}


def peer(module: str, name: str) -> str | None:
    """Return a peer's name and version, or None, and say so, where it is not installed."""
    if importlib.util.find_spec(module) is not None:
        return f"{name} {importlib.metadata.version(name)}"
    print(f"{name} is left out: pip install -r benchmarks/requirements-peers.txt", flush=True)
    return None


def laplace_torch() -> tuple[Any, str] | None:
    """Return the peer laplace-torch and its version, or None where it is not installed."""
    if (version := peer("curvlinops", "laplace-torch")) is None:
        return None
    # A script here has the name of the package.
    package = Path(str(importlib.metadata.distribution("laplace-torch").locate_file("")))
    sys.path.insert(0, str(package))
    return importlib.import_module("laplace"), version


@dataclass(frozen=True)
class Contestant:
    """One way of doing the case's work.

    Attributes:
        name: as the tables show it.
        run: does the work once; may return how many units of it (leapfrog steps) that was.
        who: `plain`, `by hand`, `ours` or a peer's name.
        limit: name of the contestant that does the same without the library.
        plain: name of the contestant that the ratio is to, where it is not the case's first.
        facts: numbers about it that are not measured in rounds.
    """

    name: str
    run: Callable[[], int | None]
    who: str
    limit: str | None = None
    plain: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)


def timed(contestant: Contestant, clock: Clock) -> float:
    """Return seconds per unit of one run."""
    start = clock()
    units = contestant.run()
    return (clock() - start) / (units or 1)


@dataclass(frozen=True)
class Quantity:
    """What a case measures.

    Attributes:
        name: in the results.
        symbol: of the unit in tables.
        factor: from the measure to that unit.
        measure: one run's number.
    """

    name: str
    symbol: str
    factor: float
    measure: Callable[[Contestant, Clock], float]


SECONDS = Quantity("seconds", "ms", 1e3, timed)
Numbers = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """Contestants that are compared; ratios are to the first and to their own limits.

    `warm_up` runs a round that is not counted; it is left out where one run does its work dozens
    of times and takes minutes. `findings` computes what follows from the rounds' numbers of all
    contestants together.
    """

    name: str
    title: str
    unit: str
    repeats: int
    contestants: list[Contestant]
    warm_up: bool = True
    quantity: Quantity = SECONDS
    findings: Callable[[Numbers], Mapping[str, Any]] | None = None


def buildable(
    makers: Mapping[str, Callable[[], Contestant]],
) -> tuple[list[Contestant], dict[str, str]]:
    """Build contestants where some may be beyond what PyTorch can do today.

    Returns:
        Those that could be built, and the beginning of the error for each of the others.
    """
    found, errors = [], {}
    for name, make in makers.items():
        try:
            found.append(make())
        except Exception as error:
            errors[name] = textwrap.shorten(f"fails, {type(error).__name__}: {error}", 200)
    return found, errors


def options(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
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
    parser.add_argument("--case", nargs="+", help="run these only, and keep others' results")
    parser.add_argument("--smoke-test", action="store_true", help="tiny sizes, one round")
    parsed = parser.parse_args(arguments)
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


def interleaved(
    contestants: list[Contestant],
    repeats: int,
    warm_up: bool = True,
    clock: Clock = time.perf_counter,
    measure: Callable[[Contestant, Clock], float] = timed,
) -> Numbers:
    """Run all contestants in turns; a round before may warm up."""
    for contestant in contestants if warm_up else ():
        contestant.run()
    numbers: Numbers = {contestant.name: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            numbers[contestant.name].append(measure(contestant, clock))
    return numbers


def summary(numbers: Iterable[float]) -> dict[str, float]:
    """Return median and quartiles, to four digits; of one number they are the number."""
    values = list(numbers)
    # Before Python 3.13 `quantiles` refuses a single number.
    quartiles = statistics.quantiles(values * 2 if len(values) == 1 else values, method="inclusive")
    low, middle, high = quartiles
    return {
        key: float(f"{value:.4g}") for key, value in (("median", middle), ("q1", low), ("q3", high))
    }


def ratio(numbers: Numbers, name: str, reference: str) -> dict[str, float]:
    """Return the summary of a contestant's numbers over a reference's, round by round."""
    pairs = zip(numbers[name], numbers[reference], strict=True)
    return summary(own / other for own, other in pairs)


def difference(numbers: Numbers, name: str, reference: str) -> dict[str, float]:
    """Return the summary of a contestant's numbers less a reference's, round by round."""
    pairs = zip(numbers[name], numbers[reference], strict=True)
    return summary(own - other for own, other in pairs)


def measured(case: Case, repeats: int, clock: Clock) -> dict[str, Any]:
    """Run one case and return its part of the results."""
    quantity = case.quantity
    numbers = interleaved(case.contestants, repeats, case.warm_up, clock, quantity.measure)
    rows = []
    for contestant in case.contestants:
        row: dict[str, Any] = {"name": contestant.name, "who": contestant.who}
        row[quantity.name] = summary(numbers[contestant.name])
        plain = contestant.plain or case.contestants[0].name
        row["to_plain"] = ratio(numbers, contestant.name, plain)
        if contestant.plain is not None:
            row["plain"] = contestant.plain
        if contestant.limit is not None:
            row["limit"] = contestant.limit
            row["to_limit"] = ratio(numbers, contestant.name, contestant.limit)
        if contestant.facts:
            row["facts"] = dict(contestant.facts)
        rows.append(row)
    results = {
        "name": case.name,
        "title": case.title,
        "unit": case.unit,
        "quantity": {
            "name": quantity.name,
            "symbol": quantity.symbol,
            "factor": quantity.factor,
        },
        "repeats": repeats,
        "contestants": rows,
    }
    if case.findings is not None:
        results["findings"] = dict(case.findings(numbers))
    return results


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
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.system()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "machine": machine,
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


def run(
    description: str,
    make_cases: dict[str, Callable[[bool], Case]],
    arguments: list[str] | None = None,
) -> None:
    """Run a benchmark from the command line.

    Args:
        description: what is measured.
        make_cases: builds each case, given whether it is a smoke test. Built one at a time, so
            that the memory of one is free again for the next.
        arguments: what a benchmark with options of its own leaves of the command line.
    """
    parsed = options(description, arguments)
    wanted = parsed.case or [*make_cases]
    if unknown := [name for name in wanted if name not in make_cases]:
        raise SystemExit(f"--case is {unknown[0]!r}; the cases are {', '.join(make_cases)}")
    about = environment(parsed)
    done = _others(parsed.json, wanted, about) if parsed.case else {}
    for name, make in make_cases.items():
        if name not in wanted:
            continue
        case = make(parsed.smoke_test)
        if parsed.smoke_test:
            title = f"{case.title} (smoke test: tiny sizes)"
            case = replace(case, title=title, repeats=1, warm_up=False)
        done[name] = measured(case, parsed.repeats or case.repeats, CLOCKS[parsed.clock])
        show(done[name])
        if parsed.json is not None:  # after each case, because the next may take minutes
            results = {
                "benchmark": Path(sys.argv[0]).stem,
                "description": description,
                "environment": about,
                "cases": [done[each] for each in make_cases if each in done],
            }
            parsed.json.parent.mkdir(parents=True, exist_ok=True)
            parsed.json.write_text(json.dumps(results, indent=1) + "\n")


def _others(path: Path | None, wanted: list[str], about: dict[str, Any]) -> dict[str, Any]:
    """Return the other cases of a file of results, by name, and note their command in `about`.

    They are kept only where they were measured with the same versions on such a machine.
    """
    if path is None or not path.exists():
        return {}
    known = json.loads(path.read_text())
    same = about.keys() - {"date", "command"}
    if any(known["environment"].get(key) != about[key] for key in same):
        raise SystemExit(f"{path} is of another machine, or of other versions: leave --case out")
    commands = [*known["environment"]["command"].split("; "), about["command"]]
    dates = sorted({*known["environment"]["date"].split(" to "), about["date"]})
    about["command"] = "; ".join(dict.fromkeys(commands))
    about["date"] = " to ".join(dates[:: max(1, len(dates) - 1)])
    return {case["name"]: case for case in known["cases"] if case["name"] not in wanted}


def show(case: dict[str, Any]) -> None:
    """Print one case's results."""
    quantity = case["quantity"]
    print(f"{case['title']} ({case['repeats']} rounds)")
    for row in case["contestants"]:
        value = quantity["factor"] * row[quantity["name"]]["median"]
        line = f"  {row['name']:44s} {value:10.3f} {quantity['symbol']}"
        line += f" {row['to_plain']['median']:8.2f} x plain"
        if "to_limit" in row:
            line += f" {row['to_limit']['median']:6.2f} x its limit"
        print(line, flush=True)
    for name, found in case.get("findings", {}).items():
        print(f"  {name}: {found['median'] if isinstance(found, dict) else found}", flush=True)
