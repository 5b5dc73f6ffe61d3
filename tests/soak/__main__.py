"""The suites of soundness at full size: `make soak`, or `python -m tests.soak --only threads`.

Figures go to docs/reliability.json and into the table of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyro
import torch

import tyxe
from tests.soak import (
    alarms,
    arguments,
    corruption,
    fuzz,
    kill,
    tasks,
    test_modes,
    test_weights,
    tests,
    threads,
)
from tests.soak.subjects import prepare

# Each with the count of the full run.
SUITES = {
    "fuzz": (fuzz.run, 2000),
    "arguments": (arguments.run, 10_000),
    "threads": (threads.run, 100),
    "alarms": (alarms.run, 3000),
    "kill": (kill.run, 200),
    "corruption": (corruption.run, 200),
    "tasks": (tasks.run, 30),
    "modes": (tests.modes, len(test_modes.CASES)),
    "weights": (test_weights.run, 1000),
    "processes": (tests.processes, len(tests.OF_PROCESSES)),
}
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "reliability.json"
PAGE = ROOT / "docs" / "reliability.md"
MARK = "<!-- {} of figures: written by python -m tests.soak -->"
BEGIN, END = MARK.format("begin"), MARK.format("end")


def written(page: str, results: dict[str, Any]) -> str:
    """Return the page with a table of the figures between its marks."""
    lines = ["| suite | seed | seconds | figures |", "|---|---|---|---|"]
    for name, one in results["suites"].items():
        figures = ", ".join(f"{key}: {value}" for key, value in one["figures"].items())
        lines.append(f"| {name} | {one['seed']} | {one['seconds']:.0f} | {figures} |")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join([*lines, "", f"{versions}; command `{results['command']}`."])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    """Run suites one after the other, and keep the figures of each as soon as it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SUITES, nargs="+", default=list(SUITES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="of each suite, in place of the full count")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    versions = {"python": platform.python_version(), "tyxe": tyxe.__version__}
    versions |= {"torch": torch.__version__, "pyro": pyro.__version__}
    results: dict[str, Any] = {"command": "make soak", "versions": versions, "suites": {}}
    if given.json.exists():
        results["suites"] = json.loads(given.json.read_text())["suites"]
    for name in given.only:
        start = time.perf_counter()
        run, count = SUITES[name]
        # In a process of its own: one that has threads cannot fork.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as process:
            figures = process.submit(run, given.count or count, given.seed).result()
        lists = {key: value for key, value in figures.items() if isinstance(value, list)}
        numbers = {key: value for key, value in figures.items() if key not in lists}
        found = {"seed": given.seed, "seconds": time.perf_counter() - start, "figures": numbers}
        results["suites"][name] = found | ({"details": lists} if any(lists.values()) else {})
        print(name, json.dumps(numbers, indent=1), *lists.values(), sep="\n", flush=True)
        given.json.write_text(json.dumps(results, indent=1) + "\n")
    if given.json == RESULTS:
        PAGE.write_text(written(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
