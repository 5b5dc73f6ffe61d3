"""For gnn.py: the scores of a net, the cells of the JSON file, and its table."""

import json
import math
import statistics
import time

from _record import environment, recorded

from tyxe import metrics

# [T tab. 5.2], mean and two standard errors of five runs.
PUBLISHED = {
    "ML": {"NLL": (1.01, 0.04), "accuracy %": (75.64, 1.28), "ECE %": (15.38, 0.97)},
    "MAP": {"NLL": (0.93, 0.03), "accuracy %": (75.94, 0.73), "ECE %": (12.78, 0.96)},
    "mean field": {"NLL": (0.77, 0.02), "accuracy %": (78.02, 1.00), "ECE %": (10.22, 1.31)},
}
DIGITS = {"NLL": 3, "accuracy %": 2, "ECE %": 2, "test NLL": 3}


def scores(data, validation, test):
    """Return a row of the table.

    Args:
        data: whose labels.
        validation: logits of the validation nodes, `(500, 7)`.
        test: logits of the test nodes, `(1000, 7)`.
    """
    seen, labels = (data.labels[data.masks[name]] for name in ("val", "test"))
    probs = test.softmax(-1)
    return {
        "NLL": metrics.nll(validation.softmax(-1), seen).item(),
        "accuracy %": 100 * metrics.accuracy(probs, labels).item(),
        "ECE %": 100 * metrics.expected_calibration_error(probs, labels, num_bins=10).item(),
        "test NLL": metrics.nll(probs, labels).item(),
    }


def run_missing(path, settings, backend, cells_to_run, methods):
    """Run the cells that a JSON file does not hold, writing it after each.

    Args:
        path: of the file; one with other settings is an error.
        settings: of all cells.
        backend: what passes messages.
        cells_to_run: pairs of a method and a seed.
        methods: functions of a seed that return a row, by name.
    """
    content = recorded(path, settings)
    cells, about = content.get("cells", {}), environment(None, content.get("commands", []))
    for name, seed in cells_to_run:
        found = cells.setdefault(backend, {}).setdefault(name, {})
        if str(seed) in found:
            continue
        start = time.process_time()
        row = methods[name](seed)
        found[str(seed)] = row = {**row, "CPU seconds": time.process_time() - start}
        shown = ", ".join(f"{column} {value:.3f}" for column, value in row.items())
        print(f"{backend}, seed {seed}, {name}: {shown}", flush=True)
        parts = {"summary": summary(cells, methods), "published": PUBLISHED, "cells": cells}
        content = {**about, "settings": settings, **parts}
        path.write_text(json.dumps(content, indent=2) + "\n")


def summary(cells, methods):
    """Return mean and two standard errors over seeds, by backend, method and column."""
    return {
        name: {method: _over_seeds(found[method]) for method in methods if found.get(method)}
        for name, found in cells.items()
    }


def _over_seeds(seeds):
    rows = list(seeds.values())
    found = {"seeds": len(rows)}
    for column in DIGITS:
        values = [row[column] for row in rows]
        error = statistics.stdev(values) / math.sqrt(len(rows)) if len(rows) > 1 else None
        found[column] = {"mean": statistics.fmean(values), "2 se": error and 2 * error}
    return found


def table(content):
    """Return what the JSON file holds as a Markdown table, [T tab. 5.2] in brackets."""
    lines = [f"| | backend | seeds | {' | '.join(DIGITS)} |", "|---" * (3 + len(DIGITS)) + "|"]
    for name, methods in content["summary"].items():
        for method, row in methods.items():
            cells = [_cell(row[column], method, column) for column in DIGITS]
            lines.append(f"| {method} | {name} | {row['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found, method, column):
    digits = DIGITS[column]
    parts = [found["mean"], found["2 se"]]
    ours = " ± ".join(f"{part:.{digits}f}" for part in parts if part is not None)
    paper = PUBLISHED.get(method, {}).get(column)
    return ours + (f" ({paper[0]:.2f} ± {paper[1]:.2f})" if paper else "")
