"""Tables and figures of records: rows over seeds, Markdown, and scores of class probabilities."""

import statistics
import time

from tyxe import metrics


def rows(cells):
    """Return rows over seeds, lists by name: those of a cell, or the cell under its own name."""
    found = {}
    for key, cell in cells.items():
        for name, row in (cell["rows"] if "rows" in cell else {key[-2]: cell}).items():
            found.setdefault(name, []).append(row)
    return found


def error_of(values):
    """Return the standard error of a mean."""
    return statistics.stdev(values) / len(values) ** 0.5


def over_seeds(values, form, factor=1, errors=1):
    """Return `mean ± standard error`, or as many errors; both times a factor; "" of no values."""
    mean = format(factor * statistics.fmean(values), form) if values else ""
    return f"{mean} ± {errors * factor * error_of(values):{form}}" if len(values) > 1 else mean


def markdown(columns, lines):
    """Return a table in Markdown."""
    head = f"| {' | '.join(columns)} |".replace("|  |", "| |", 1)
    return "\n".join([head, "|---" * len(columns) + "|", *(f"| {' | '.join(x)} |" for x in lines)])


def score_table(rows, forms, paper=None, before=None, errors=1):
    """Return mean and standard error over seeds of some columns of all rows, as Markdown.

    Args:
        rows: as `rows` returns them; a row's name may be a tuple, of which the first is shown.
        forms: how the numbers of each column are written.
        paper: from the names of row and column to the text in brackets, or None.
        before: columns that go before those: from a row's name and its rows to a text.
        errors: how many standard errors.
    """
    lines, before = [], before or {}
    for name, found in rows.items():
        cells = [make(name, found) for make in before.values()]
        for column, form in forms.items():
            text = over_seeds([row[column] for row in found if column in row], form, errors=errors)
            known = paper(name, column) if paper and text else None
            cells.append(text if known is None else f"{text} ({known})")
        lines.append([name if isinstance(name, str) else name[0], *cells])
    return markdown(["", *before, *forms], lines)


def scores(probs, targets, bins=15):
    """Return the scores of class probabilities that most tables have."""
    return {
        "accuracy %": 100 * metrics.accuracy(probs, targets).item(),
        "NLL": metrics.nll(probs, targets).item(),
        "ECE %": 100 * metrics.expected_calibration_error(probs, targets, num_bins=bins).item(),
    }


class Laps:
    """Seconds from one call to the next, by name."""

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def __call__(self, name):
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def subplots(*shape, **options):
    """Return a figure, which is never shown, and its axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    return plt.subplots(*shape, layout="constrained", **options)
