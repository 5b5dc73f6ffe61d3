"""Write the table of the demo in docs/examples.md from its JSON, or check that it is up to date."""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "examples.md"
RESULTS = ROOT / "experiments" / "results" / "quickstart_digits.json"
BEGIN = "<!-- begin of the quickstart's table: written by docs/quickstart_table.py -->"
END = "<!-- end of the quickstart's table -->"
HIDDEN = {"validation NLL"}
FORMATS = {"error %": ".2f", "NLL": ".3f", "ECE %": ".2f", "train s": ".1f", "predict s": ".2f"}


def table(results):
    """Return a Markdown table, and the command and machine it came from."""
    rows = results["rows"]
    columns = [column for column in next(iter(rows.values())) if column not in HIDDEN]
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [format(row[column], FORMATS.get(column, ".3f")) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    settings = ", ".join(f"{key} {value}" for key, value in results["settings"].items())
    machine = results["machine"]
    source = (
        f"`{results['command']}`, seed {results['seed']}: {settings}; torch "
        f"{results['versions']['torch']} on {machine['cores']} cores."
    )
    return "\n".join([*lines, "", source])


def written(page):
    """Return the page with the table between its marks written anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(json.loads(RESULTS.read_text()))}\n\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    check = parser.parse_args().check
    page = PAGE.read_text()
    if check and written(page) != page:
        raise SystemExit("the demo's table is not that of the JSON: run docs/quickstart_table.py")
    if not check:
        PAGE.write_text(written(page))
