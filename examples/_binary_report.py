"""For binary.py: scores, curves, and the table and figure of what was found."""

import math
import statistics

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch

from tyxe import metrics

# What `BinaryPrior` and `fit` are told; None where there is no posterior.
ROWS = {
    "real weights": None,
    "STE": None,
    "STE ensemble": None,
    "Bernoulli, tau 1": {"tau": 1.0},
    "Bernoulli, tau 0.01": {"tau": 0.01},
    "Bernoulli, tau 0.001": {"tau": 0.001},
    "Beta, delta 0": {"delta": 0.0},
    "Beta, delta 0.001": {"delta": 0.001},
    "Beta, delta 0.0001": {"delta": 0.0001},
}
# [T tab. 4.2], of the whole net and all images.
PAPER = {
    "STE": {"accuracy %": 99.21, "NLL": 0.027},
    "STE ensemble": {"accuracy %": 99.25, "NLL": 0.022},
    "Bernoulli, tau 1": {"accuracy %": 95.21, "NLL": 0.237},
    "Bernoulli, tau 0.01": {"accuracy %": 98.99, "NLL": 0.033},
    "Bernoulli, tau 0.001": {"accuracy %": 98.97, "NLL": 0.032},
    "Beta, delta 0": {"accuracy %": 99.02, "NLL": 0.029},
    "Beta, delta 0.001": {"accuracy %": 99.03, "NLL": 0.028},
    "Beta, delta 0.0001": {"accuracy %": 99.06, "NLL": 0.028},
}
FORMATS = {
    "accuracy %": ".2f",
    "NLL": ".3f",
    "ECE %": ".2f",
    "OOD entropy": ".2f",
    "OOD AUROC": ".3f",
    "weight entropy": ".3f",
    "training NLL": ".3f",
}
TITLES = {"cnn": "Convolutional", "mlp": "Fully connected"}
ENTROPIES = [round(i * math.log(10) / 20, 4) for i in range(21)]
CONFIDENCES = [i / 20 for i in range(2, 20)] + [0.99]


def scores(known, targets, unknown):
    """Return the columns of the table from class probabilities of test and other images."""
    entropies = metrics.predictive_entropy(known), metrics.predictive_entropy(unknown)
    return {
        "accuracy %": 100 * metrics.accuracy(known, targets).item(),
        "NLL": metrics.nll(known, targets).item(),
        "ECE %": 100 * metrics.expected_calibration_error(known, targets).item(),
        "OOD entropy": entropies[1].mean().item(),
        "OOD AUROC": metrics.ood_auroc(*(-entropy for entropy in entropies)).item(),
    }


def curves(known, targets, unknown):
    """Return the three panels' curves; None where no prediction falls."""
    probs = known.flatten()
    is_right = torch.nn.functional.one_hot(targets, known.shape[-1]).flatten().float()
    bins = (10 * probs).long().clamp(max=9)
    entropy = metrics.predictive_entropy(unknown)
    confidence = torch.cat([known.amax(-1), unknown.amax(-1)])
    correct = torch.cat([(known.argmax(-1) == targets).float(), torch.zeros(len(unknown))])
    return {
        "probability": [_mean(probs[bins == i]) for i in range(10)],
        "frequency": [_mean(is_right[bins == i]) for i in range(10)],
        "share of OOD": [_mean((entropy <= v).float()) for v in ENTROPIES],
        "accuracy above": [_mean(correct[confidence >= c]) for c in CONFIDENCES],
    }


def _mean(values):
    return round(values.mean().item(), 5) if len(values) else None


def mean_of(found):
    """Return the mean of numbers in alike dictionaries and lists, leaving None out."""
    first = found[0]
    if isinstance(first, dict):
        return {name: mean_of([each[name] for each in found]) for name in first}
    if isinstance(first, list):
        return [mean_of(list(each)) for each in zip(*found, strict=True)]
    numbers = [each for each in found if each is not None]
    return statistics.fmean(numbers) if numbers else None


def summary(cells):
    """Return mean and standard error over seeds of every row's columns, by net."""
    return {
        kind: {row: _columns(seeds) for row, seeds in rows.items() if seeds}
        for kind, rows in cells.items()
    }


def _columns(seeds):
    found = {}
    for column in FORMATS:
        values = [cell[column] for cell in seeds.values() if column in cell]
        if values:
            error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            found[column] = {"mean": statistics.fmean(values), "standard error": error}
    return found


def table(content):
    """Return what the JSON holds as Markdown tables."""
    blocks = []
    for kind, rows in content["summary"].items():
        if rows:
            seeds = ", ".join(sorted({str(len(content["cells"][kind][row])) for row in rows}))
            lines = [f"**{TITLES[kind]}**, seeds: {seeds}", ""]
            lines += [f"| | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 1) + "|"]
            lines += [
                f"| {row} | {' | '.join(_cell(kind, row, column, found) for column in FORMATS)} |"
                for row, found in rows.items()
            ]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cell(kind, row, column, found):
    if column not in found:
        return ""
    mean, error = found[column].values()
    form = FORMATS[column]
    text = format(mean, form) + ("" if error is None else f" ± {error:{form}}")
    paper = PAPER.get(row, {}).get(column) if kind == "cnn" else None
    return text + ("" if paper is None else f" ({paper:{form}})")


def figure(content, path, kind="cnn"):
    """Draw the three panels, averaged over seeds."""
    drawn, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    colours = plt.get_cmap("tab10").colors
    rows = {row: list(seeds.values()) for row, seeds in content["cells"][kind].items() if seeds}
    for colour, (row, seeds) in zip(colours, rows.items(), strict=False):
        mean = mean_of([cell["curves"] for cell in seeds])
        pairs = [
            (mean["probability"], mean["frequency"]),
            (ENTROPIES, mean["share of OOD"]),
            (CONFIDENCES, mean["accuracy above"]),
        ]
        for ax, pair in zip(axes, pairs, strict=True):
            points = [(x, y) for x, y in zip(*pair, strict=True) if x is not None and y is not None]
            ax.plot(*zip(*points, strict=True), color=colour, label=row, marker=".")
    axes[0].plot([0, 1], [0, 1], color="black", linestyle="dashed", linewidth=1)
    labels = [
        ("class probability", "relative frequency"),
        ("v, nats", "share of FashionMNIST, entropy at most v"),
        ("c", "accuracy where confidence is at least c"),
    ]
    for letter, ax, (x, y) in zip("abc", axes, labels, strict=True):
        ax.set(title=f"({letter})", xlabel=x, ylabel=y)
    drawn.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)
