"""Tables and figures of records: rows over seeds, Markdown, and scores of class probabilities."""

import statistics

from tyxe import metrics


def rows(cells):
    """Return rows over seeds, lists by name: those of a cell, or the cell under its own name."""
    found = {}
    for key, cell in cells.items():
        for name, row in (cell["rows"] if "rows" in cell else {key[-2]: cell}).items():
            found.setdefault(name, []).append(row)
    return found


def error_of(values):
    return statistics.stdev(values) / len(values) ** 0.5


def over_seeds(values, form, factor=1, errors=1):
    """Return `mean ± standard error`, or as many errors; both times a factor; "" of no values."""
    mean = format(factor * statistics.fmean(values), form) if values else ""
    return f"{mean} ± {errors * factor * error_of(values):{form}}" if len(values) > 1 else mean


def markdown(columns, lines):
    head = f"| {' | '.join(columns)} |".replace("|  |", "| |", 1)
    return "\n".join([head, "|---" * len(columns) + "|", *(f"| {' | '.join(x)} |" for x in lines)])


def score_table(rows, forms, paper=None, count=(), errors=1):
    """Return mean and standard error over seeds of some columns of all rows, as Markdown.

    Rows are as `rows` returns them, or of tuples, whose parts are columns. `forms` has how each
    column is written, `paper` the text in brackets by row and column, and `count` titles of the
    columns before them: the parts of a row's name but for the first, and the number of seeds.
    """
    lines, paper = [], paper or {}
    for name, found in rows.items():
        parts = name if isinstance(name, tuple) else (name,)
        cells = [*parts, str(len(found))] if count else [*parts]
        for column, form in forms.items():
            text = over_seeds([row[column] for row in found if column in row], form, errors=errors)
            known = paper.get((parts[0], column)) if text else None
            cells.append(f"{text} ({known})" if known else text)
        lines.append(cells)
    return markdown(["", *count, *forms], lines)


def scores(probs, targets, bins=15):
    """Return the scores of class probabilities that most tables have."""
    return {
        "accuracy %": 100 * metrics.accuracy(probs, targets).item(),
        "NLL": metrics.nll(probs, targets).item(),
        "ECE %": 100 * metrics.expected_calibration_error(probs, targets, num_bins=bins).item(),
    }


def subplots(*shape, **options):
    """Return a figure, which is never shown, and its axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    return plt.subplots(*shape, layout="constrained", **options)
