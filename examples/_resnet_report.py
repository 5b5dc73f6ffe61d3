"""For resnet.py: scores, the table, and the figure of what was found."""

import json
import math
import statistics

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch

from tyxe import metrics, plotting

# [T tab. 5.1], CIFAR-10 against SVHN: NLL, accuracy %, ECE %, OOD AUROC.
PAPER = {
    "ml": (0.33, 94.29, 4.10, 0.78),
    "map": (0.29, 92.14, 4.44, 0.82),
    "mean-field-sd-only": (0.27, 93.66, 3.14, 0.93),
    "mean-field": (0.20, 93.28, 0.97, 0.94),
    "last-layer-mean-field": (0.35, 93.36, 3.62, 0.89),
    "last-layer-low-rank": (0.34, 93.31, 3.75, 0.89),
}
COLUMNS = {"NLL": ".3f", "accuracy %": ".2f", "ECE %": ".2f", "OOD AUROC": ".3f"}
SECONDS = {"train s": ".0f", "predict s": ".1f"}


def scores(bnn, data, how):
    """Return the columns of the table and both panels' curves, by predictions made this way."""
    (x, targets), unknown = data.test, data.unknown
    known, unknown = (bnn.predict(images, **how).softmax(-1).cpu() for images in (x, unknown))
    targets = targets.cpu()
    curve = metrics.calibration_curve(known, targets)
    levels = torch.linspace(0, 1, 101)
    entropies = {"test": metrics.predictive_entropy(known)}
    entropies["OOD"] = metrics.predictive_entropy(unknown)
    row = {
        "NLL": metrics.nll(known, targets),
        "accuracy %": 100 * metrics.accuracy(known, targets),
        "ECE %": 100 * metrics.expected_calibration_error(known, targets),
        "OOD AUROC": metrics.ood_auroc(known.amax(-1), unknown.amax(-1)),
    }
    curves = {name: rounded(getattr(curve, name)) for name in ("confidence", "accuracy", "counts")}
    for name, entropy in entropies.items():
        curves[f"{name} entropy quantiles"] = rounded(entropy.double().quantile(levels.double()))
    return {**{name: value.item() for name, value in row.items()}, "curves": curves}


def rounded(values):
    """Return a list of numbers of a few digits; None where there is none."""
    return [None if math.isnan(value) else round(value, 4) for value in values.tolist()]


def same(cells, settings):
    """Return the cells, by seed, that were found with these settings."""
    return {seed: cell for seed, cell in cells.items() if cell["settings"] == settings}


def summary(cells):
    """Return mean and standard error over seeds, for each row of the table and column."""
    rows = {}
    for name, seeds in cells.items():
        own = list(seeds.values())
        drawn = [cell["weights drawn"] for cell in own if "weights drawn" in cell]
        for row, found in ((name, own), (f"{name}, weights drawn", drawn)):
            if found:
                rows[row] = {"seeds": len(found)} | _columns(found)
    return rows


def _columns(rows):
    found = {}
    for column in COLUMNS | SECONDS:
        if column in rows[0]:
            values = [row[column] for row in rows]
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            found[column] = {"mean": statistics.fmean(values), "standard error": error}
    return found


def reported(path, with_figure):
    """Return the table of a JSON file, having drawn its figure if asked to."""
    content = json.loads(path.read_text())
    if with_figure:
        figure(content, path.with_suffix(".png"))
    return table(content)


def table(content):
    """Return what the JSON holds as a Markdown table, [T tab. 5.1] in brackets."""
    forms = COLUMNS | SECONDS
    chosen = content["settings"]
    of = f"{chosen['training images'] or 'all'} training images"
    how = f"Width {chosen['width']}, {chosen['epochs']} epochs, {of}; in brackets the paper."
    lines = [how, "", f"| | seeds | {' | '.join(forms)} |", "|---" * (2 + len(forms)) + "|"]
    for name, found in content["summary"].items():
        paper = dict(zip(COLUMNS, PAPER.get(name, ()), strict=False))
        cells = [_cell(found.get(c), form, paper.get(c)) for c, form in forms.items()]
        lines.append(f"| {name} | {found['seeds']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found, form, paper):
    if found is None:
        return ""
    mean, error = found.values()
    text = format(mean, form) + ("" if error is None else f" ± {error:{form}}")
    return text if paper is None else f"{text} ({paper:.2f})"


def figure(content, path):
    """Draw calibration curves and entropies of the first seed [T fig. 5.2]."""
    drawn, (left, right) = plt.subplots(1, 2, figsize=(9, 5), layout="constrained")
    left.plot([0, 1], [0, 1], color="0.6", linestyle="dashed", linewidth=1)
    found = [(name, seeds) for name, seeds in content["cells"].items() if seeds]
    for color, (name, seeds) in zip(plotting.PALETTE, found, strict=False):
        cell = next(iter(seeds.values()))
        curves = cell["curves"]
        # The accuracy of a few points says nothing.
        bins = zip(curves["confidence"], curves["accuracy"], curves["counts"], strict=True)
        points = [(x, y) for x, y, count in bins if count >= 10]
        label = f"{name} (ECE {cell['ECE %']:.1f} %)"
        left.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=label)
        for which, style in (("test", "solid"), ("OOD", "dashed")):
            entropy = torch.tensor(curves[f"{which} entropy quantiles"])
            how = {"linestyle": style, "color": color, "max_entropy": math.log(10)}
            plotting.entropy_ecdf(entropy, right, **how)
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    right.set(title="CIFAR-10 test set solid, SVHN dashed")
    drawn.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)
