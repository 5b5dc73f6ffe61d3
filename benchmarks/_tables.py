"""Write the tables of docs/benchmarks.md from the results, or check that they are up to date."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MARK = "<!-- {edge} of {name}: written by benchmarks/_tables.py -->"


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    if not rounded:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"


def cell(numbers: dict[str, float] | None, factor: float = 1.0) -> str:
    """Return median and quartiles, `1.52 (1.48 to 1.60)`."""
    if numbers is None:
        return ""
    middle, low, high = (number(factor * numbers[key]) for key in ("median", "q1", "q3"))
    return f"{middle} ({low} to {high})"


# What the results that do not name their quantity measured.
SECONDS = {"name": "seconds", "symbol": "ms", "factor": 1e3}


def table(case: dict[str, Any]) -> str:
    """Return one case's table, by contestant, and what was found from all of them together."""
    rows = case["contestants"]
    quantity = case.get("quantity", SECONDS)
    references = {row.get("plain", rows[0]["name"]) for row in rows}
    to_plain = f"ratio to {rows[0]['name']}" if len(references) == 1 else "ratio to its reference"
    columns = {f"{quantity['symbol']} per {case['unit']}": measured_cell(quantity), to_plain: plain}
    if any("limit" in row for row in rows):
        columns["ratio to its limit"] = lambda row, _: cell(row.get("to_limit"))
    for fact in dict.fromkeys(fact for row in rows for fact in row.get("facts", {})):
        columns[fact] = functools.partial(fact_cell, fact)
    lines = [
        f"### {case['title']}",
        "",
        f"| contestant | {' | '.join(columns)} |",
        f"|---{'|---' * len(columns)}|",
    ]
    for row in rows:
        cells = [row["name"], *(make(row, rows[0]) for make in columns.values())]
        lines.append(f"| {' | '.join(cells)} |")
    found = [f"- {name}: {finding(value)}" for name, value in case.get("findings", {}).items()]
    return "\n".join([*lines, "", rounds(case), *(["", *found] if found else [])])


Row = dict[str, Any]


def measured_cell(quantity: dict[str, Any]) -> Callable[[Row, Row], str]:
    """Return what writes a row's measure in the table's unit."""
    return lambda row, _: cell(row[quantity["name"]], quantity["factor"])


def plain(row: Row, first: Row) -> str:
    """Return a row's ratio to its reference, unless it is one."""
    return cell(None if row.get("plain", first["name"]) == row["name"] else row["to_plain"])


def fact_cell(fact: str, row: Row, _: Row) -> str:
    """Return one of the numbers that were not measured in rounds."""
    facts = row.get("facts", {})
    return number(facts[fact]) if fact in facts else ""


def finding(value: Any) -> str:
    """Return a number, a summary or a text."""
    if isinstance(value, dict):
        return cell(value)
    return value if isinstance(value, str) else number(value)


def rounds(case: dict[str, Any]) -> str:
    """Return how often a case ran, and the limits that do not go without saying."""
    text = f"{case['repeats']} interleaved rounds; median (quartiles)."
    pairs = [(row["name"], row["limit"]) for row in case["contestants"] if "limit" in row]
    if not all("by hand" in limit for _, limit in pairs):
        text += f" Limits: {'; '.join(f'{name}: {limit}' for name, limit in pairs)}."
    return text


def provenance(results: dict[str, Any]) -> str:
    """Return one sentence on where the numbers come from."""
    env = results["environment"]
    machine, versions = env["machine"], env["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    threads = "one thread" if env["threads"] == 1 else f"{env['threads']} threads"
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"Measured on {env['date']}: {machine['cpu']}, {machine['cores']} cores, {threads}{gpu}; "
        f"{listed}; seed {env['seed']}. Command: `{env['command']}`."
    )


def section(results: dict[str, Any]) -> str:
    """Return all tables of one benchmark."""
    return "\n\n".join([provenance(results), *map(table, results["cases"])])


def written(page: str) -> str:
    """Return the page with every section between its marks written anew.

    Raises:
        ValueError: the page has no marks for some benchmark.
    """
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        begin, end = (MARK.format(edge=edge, name=path.stem) for edge in ("begin", "end"))
        if begin not in page or end not in page:
            raise ValueError(f"{PAGE.name} lacks the marks of {path.stem}: {begin} and {end}")
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{section(results)}\n\n{end}{after}"
    return page


def main() -> None:
    """Write the page, or with `--check` fail if it is not what the results say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    check = parser.parse_args().check
    page = PAGE.read_text()
    new = written(page)
    if check and new != page:
        raise SystemExit(f"{PAGE.name} is not what the results say: run benchmarks/_tables.py")
    if not check:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()
