"""The table of the demo in docs/examples.md, from its JSON."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results" / "quickstart_digits.json"
HIDDEN = {"validation NLL"}
FORMATS = {"error %": ".2f", "NLL": ".3f", "ECE %": ".2f", "train s": ".1f", "predict s": ".2f"}


def table():
    """Return a Markdown table of means and errors, and the command and machine it came from."""
    results = json.loads(RESULTS.read_text())
    rows = results["rows"]
    columns = [column for column in next(iter(rows.values())) if column not in HIDDEN]
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [" ± ".join(format(v, FORMATS.get(c, ".3f")) for v in row[c]) for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    settings = ", ".join(f"{key} {value}" for key, value in results["settings"].items())
    machine = results["machine"]
    source = (
        f"`{results['command']}`, seed {results['seed']}: {settings}; torch "
        f"{results['versions']['torch']} on {machine['cores']} cores."
    )
    return "\n".join([*lines, "", source])
