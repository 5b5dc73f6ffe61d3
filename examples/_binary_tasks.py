"""For binary_continual.py: its rows, and the table and figure of what was found."""

import math
import statistics

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

ROWS = {
    "Bernoulli, tau 1": {"tau": 1.0},
    "Bernoulli, tau 0.1": {"tau": 0.1},
    "Bernoulli, tau 0.01": {"tau": 0.01},
    "Beta, delta 0, tau 1": {"delta": 0.0, "tau": 1.0},
    "Beta, delta 0": {"delta": 0.0, "tau": 0.1},
    "Beta, delta 0.01": {"delta": 0.01, "tau": 0.1},
    "Beta, delta 0.1": {"delta": 0.1, "tau": 0.1},
    "STE, clipped": {"clip": True},
    "STE": {"clip": False},
}
# From the accuracies on the tasks seen, in their order, to one number.
PANELS = {
    "tasks seen, mean": statistics.fmean,
    "first task": lambda found: found[0],
    "newest task": lambda found: found[-1],
}


def over_seeds(values):
    """Return mean and standard error (None of a single number)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def accuracy_curves(seeds):
    """Return mean and standard error after each task, for each panel."""
    matrices = [cell["accuracy %"] for cell in seeds.values()]
    return {
        title: [over_seeds([of(row) for row in rows]) for rows in zip(*matrices, strict=True)]
        for title, of in PANELS.items()
    }


def entropy_curves(seeds):
    """Return mean and standard error after each task, for each layer."""
    found = [cell["weight entropy"] for cell in seeds.values() if "weight entropy" in cell]
    if not found:
        return {}
    return {
        site: [over_seeds([each[site] for each in after]) for after in zip(*found, strict=True)]
        for site in found[0][0]
    }


def _text(found, form):
    mean, error = found
    return format(mean, form) + ("" if error is None else f" ± {error:{form}}")


def table(content):
    """Return what the JSON holds after the last task, as a Markdown table."""
    cells = {row: seeds for row, seeds in content["cells"].items() if seeds}
    # Of the straight-through estimator there are none.
    sites = list(next(filter(None, map(entropy_curves, cells.values())), {}))
    layers = [f"entropy, layer {index + 1}" for index in range(len(sites))]
    columns = ["seeds", *(f"{title} %" for title in PANELS), *layers]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row, seeds in cells.items():
        accuracy, entropy = accuracy_curves(seeds), entropy_curves(seeds)
        texts = [str(len(seeds)), *(_text(curve[-1], ".2f") for curve in accuracy.values())]
        texts += [_text(entropy[site][-1], ".3f") if entropy else "" for site in sites]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def figure(content, path):
    """Draw accuracies above, entropies of weights below, against the number of tasks."""
    drawn, axes = plt.subplots(2, 3, figsize=(12, 7), sharey="row", layout="constrained")
    cells = {row: seeds for row, seeds in content["cells"].items() if seeds}
    for colour, (row, seeds) in zip(plt.get_cmap("tab10").colors, cells.items(), strict=False):
        for of, place in ((accuracy_curves, axes[0]), (entropy_curves, axes[1])):
            for ax, curve in zip(place, of(seeds).values(), strict=False):
                tasks = range(1, len(curve) + 1)
                means, errors = zip(*curve, strict=True)
                bars = None if None in errors else [2 * error for error in errors]
                ax.errorbar(tasks, means, bars, color=colour, label=row, marker=".")
    for ax, title in zip(axes[0], PANELS, strict=True):
        ax.set(title=title, xlabel="tasks", ylabel="accuracy, %")
    for index, ax in enumerate(axes[1]):
        ax.set(title=f"layer {index + 1}", xlabel="tasks", ylabel="entropy of a weight, nats")
        ax.axhline(math.log(2), color="black", linestyle="dashed", linewidth=1)
    drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)
