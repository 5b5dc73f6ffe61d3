"""Tables and figures of records: rows over seeds, Markdown, and scores of class probabilities."""

import math
import statistics
from itertools import zip_longest

import torch

from tyxe import metrics, plotting


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
    """Return `mean ± standard error`, or as many errors; both times a factor; "" of no values.

    Of values that are not all finite it is the mean alone.
    """
    mean = format(factor * statistics.fmean(values), form) if values else ""
    has_error = len(values) > 1 and all(map(math.isfinite, values))
    return f"{mean} ± {errors * factor * error_of(values):{form}}" if has_error else mean


def errorbar(ax, x, values, errors=1, **look):
    """Draw means of lists of values at x, and as many standard errors where there are several."""
    bars = [errors * error_of(found) if len(found) > 1 else 0.0 for found in values]
    ax.errorbar(x, [*map(statistics.fmean, values)], bars if any(bars) else None, **look)


def markdown(columns, lines):
    head = f"| {' | '.join(columns)} |".replace("|  |", "| |", 1)
    return "\n".join([head, "|---" * len(columns) + "|", *(f"| {' | '.join(x)} |" for x in lines)])


def score_table(rows, forms, paper=None, count=(), errors=1):
    """Return mean and standard error over seeds of some columns of all rows, as Markdown.

    Rows are as `rows` returns them, or of tuples, whose parts are columns. `forms` has how each
    column is written, `paper` texts in brackets by row, as many as are known, and `count` titles of
    the columns before them: the parts of a row's name but for the first, and the number of seeds.
    """
    lines = []
    for name, found in rows.items():
        parts = name if isinstance(name, tuple) else (name,)
        cells = [*parts, str(len(found))] if count else [*parts]
        known = (paper or {}).get(parts[0], ())
        for (column, form), published in zip_longest(forms.items(), known):
            text = over_seeds([row[column] for row in found if column in row], form, errors=errors)
            cells.append(f"{text} ({published})" if text and published else text)
        lines.append(cells)
    return markdown(["", *count, *forms], lines)


def scores(probs, targets, bins=15):
    """Return the scores of class probabilities that most tables have."""
    return {
        "accuracy %": 100 * metrics.accuracy(probs, targets).item(),
        "NLL": metrics.nll(probs, targets).item(),
        "ECE %": 100 * metrics.expected_calibration_error(probs, targets, num_bins=bins).item(),
    }


def rounded(values, digits=4):
    """Return the numbers of a tensor as a record holds them: rounded, None for NaN."""
    found = values.flatten().tolist()
    return [None if math.isnan(value) else round(value, digits) for value in found]


def of(forms):
    """Return the function from a record to a table of these columns."""
    return lambda record: score_table(rows(record.cells), forms)


def by_entropy(known, unknown):
    """Return the entropies of class probabilities of known and unknown images, and their AUROC."""
    inside, outside = metrics.predictive_entropy(known), metrics.predictive_entropy(unknown)
    return inside, outside, metrics.ood_auroc(-inside, -outside).item()


def subplots(*shape, **options):
    """Return a figure, which is never shown, and its axes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    return plt.subplots(*shape, layout="constrained", **options)


def bands(panels, x, data, truth, limits, size):
    """Draw predictions, pairs of a title and `mean` and `sd`, in rows of panels with limits."""
    shape, share = (len(limits), -(-len(panels) // len(limits))), {"sharex": True, "sharey": "row"}
    drawn, axes = subplots(*shape, figsize=size, squeeze=False, **share)
    for ax, (title, cell) in zip(axes.flat, panels, strict=False):
        band = torch.tensor(cell["mean"]), torch.tensor(cell["sd"])
        plotting.predictive_band(x, *band, ax, train_data=data, true_function=truth)
        ax.get_legend().remove()
        ax.set(title=title, xlim=(x.min().item(), x.max().item()))
        ax.label_outer()
    for line, limit in zip(axes, limits, strict=True):
        line[0].set_ylim(-limit, limit)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    drawn.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return drawn
