"""Write the tables of docs/benchmarks.md from the results, or check that they are up to date."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MARK = "<!-- {edge} of {name}: written by benchmarks/_tables.py -->"


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{rounded:.{decimals}f}"


def cell(numbers: dict[str, float] | None, factor: float = 1.0) -> str:
    """Return median and quartiles, `1.52 (1.48 to 1.60)`."""
    if numbers is None:
        return ""
    middle, low, high = (number(factor * numbers[key]) for key in ("median", "q1", "q3"))
    return f"{middle} ({low} to {high})"


def table(case: dict[str, Any]) -> str:
    """Return one case's table, by contestant."""
    first = case["contestants"][0]
    lines = [
        f"### {case['title']}",
        "",
        f"| contestant | ms per {case['unit']} | ratio to {first['name']} | ratio to its limit |",
        "|---|---|---|---|",
    ]
    for row in case["contestants"]:
        to_plain = None if row is first else row["to_plain"]
        cells = [
            row["name"],
            cell(row["seconds"], 1e3),
            cell(to_plain),
            cell(row.get("to_limit")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    rounds = f"{case['repeats']} interleaved rounds; median (quartiles)."
    limits = {row["limit"]: row["name"] for row in case["contestants"] if "limit" in row}
    if not all("by hand" in limit for limit in limits):
        pairs = [f"{row['name']}: {row['limit']}" for row in case["contestants"] if "limit" in row]
        rounds += f" Limits: {'; '.join(pairs)}."
    return "\n".join([*lines, "", rounds])


def provenance(results: dict[str, Any]) -> str:
    """Return one sentence on where the numbers come from."""
    env = results["environment"]
    machine, versions = env["machine"], env["versions"]
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    threads = "one thread" if env["threads"] == 1 else f"{env['threads']} threads"
    return (
        f"Measured on {env['date']}: {machine['cpu']}, {machine['cores']} cores, {threads}; "
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
        begin, end = (MARK.format(edge=edge, name=path.stem) for edge in ("begin", "end"))
        if begin not in page or end not in page:
            raise ValueError(f"{PAGE.name} lacks the marks of {path.stem}: {begin} and {end}")
        before, rest = page.split(begin)
        _, after = rest.split(end)
        text = section(json.loads(path.read_text()))
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
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
