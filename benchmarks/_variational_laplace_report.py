"""For variational_laplace.py: tables and figure of its JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from _tables import provenance
from matplotlib.axes import Axes

Cell = dict[str, Any]
Cells = dict[str, Cell]
# Method, beta, multiplier of the scales' learning rate, seed.
Job = tuple[str, float, float, int]

MULTIPLIER = 10.0
TITLES = {"fashion_mnist": "FashionMNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}
ROWS = {
    "VL, mean network": ("VL", "mean"),
    "VL, 10 draws": ("VL", "draws"),
    "VI, mean network": ("VI", "mean"),
    "VI, 10 draws": ("VI", "draws"),
    "MAP": ("MAP", "mean"),
}
# NLL, accuracy and ECE of [GR] table 1, PreactResNet-18 on the whole sets.
PUBLISHED = {
    "fashion_mnist": {
        "VL, mean network": "0.16 / 94.6 / 0.010",
        "VI, mean network": "0.23 / 94.0 / 0.034",
        "MAP": "0.29 / 93.6 / 0.096",
    },
    "cifar10": {
        "VL, mean network": "0.23 / 92.4 / 0.017",
        "VI, mean network": "0.37 / 91.1 / 0.053",
        "VI, 10 draws": "0.35 / 90.2 / 0.044",
        "MAP": "0.43 / 90.8 / 0.058",
    },
}
COLUMNS = {"NLL": (1, 3), "accuracy": (100, 1), "ECE": (1, 3), "AUROC": (1, 3)}


def key(method: str, beta: float, multiplier: float, seed: int) -> str:
    """Return a cell's name; MAP has no scales to multiply the rate of."""
    rate = "" if method == "MAP" else f", multiplier {multiplier:g}"
    return f"{method}, beta {beta:g}{rate}, seed {seed}"


def job_of(name: str) -> Job:
    """Return what a cell's name says."""
    method, *parts = name.split(", ")
    numbers = dict(part.split(" ") for part in parts)
    multiplier = float(numbers.get("multiplier", MULTIPLIER))
    return method, float(numbers["beta"]), multiplier, int(numbers["seed"])


def chosen(cells: Cells, accept: Callable[[Job], bool]) -> dict[Job, Cell]:
    """Return the cells whose job is accepted."""
    return {job: cell for name, cell in cells.items() if accept(job := job_of(name))}


def first_seed(cells: Cells) -> int:
    """Return the seed that the sweep ran with."""
    return min(job_of(name)[3] for name in cells)


def best_beta(cells: Cells, method: str, way: str) -> float:
    """Return the beta with the lowest validation NLL with the first seed."""
    seed = first_seed(cells)
    swept = chosen(cells, lambda job: (job[0], *job[2:]) == (method, MULTIPLIER, seed))
    return min(swept, key=lambda job: swept[job]["scores"][way]["validation NLL"])[1]


# --------------------------------------------------------------------------- tables


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def over_seeds(values: list[float], factor: float, digits: int) -> str:
    """Return mean and standard error."""
    mean = f"{factor * statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    error = factor * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean} ± {error:.{digits}f}"


def best_table(name: str, cells: Cells) -> str:
    """Return every method at its best beta, the paper's numbers beside it."""
    published = PUBLISHED.get(name, {})
    rows = []
    for title, (method, way) in ROWS.items():
        beta = best_beta(cells, method, way)
        found = chosen(cells, lambda job, own=(method, beta, MULTIPLIER): job[:3] == own)
        scores = [cell["scores"][way] for cell in found.values()]
        numbers = [
            over_seeds([row[column] for row in scores], *how) for column, how in COLUMNS.items()
        ]
        row = [title, f"{beta:g}", *numbers, str(len(scores))]
        rows.append([*row, published.get(title, "")] if published else row)
    columns = ["", "beta", "NLL", "accuracy %", "ECE", "AUROC", "seeds"]
    if published:
        columns.append("[GR] tab. 1: NLL / accuracy / ECE")
    return markdown(columns, rows)


def sweep_table(cells: Cells) -> str:
    """Return test NLL and ECE by beta, with the first seed."""
    seed = first_seed(cells)
    swept = chosen(cells, lambda job: job[2:] == (MULTIPLIER, seed))
    betas = sorted({job[1] for job in swept}, reverse=True)
    rows = []
    for title, (method, way) in ROWS.items():
        scores = [swept[method, beta, MULTIPLIER, seed]["scores"][way] for beta in betas]
        rows.append([title, *(f"{s['NLL']:.3f} / {s['ECE']:.3f}" for s in scores)])
    return markdown(["NLL / ECE", *(f"beta {beta:g}" for beta in betas)], rows)


def seconds_line(cells: Cells) -> str:
    """Return median seconds of a fit, by method."""
    parts = []
    for method in ("VL", "VI", "MAP"):
        found = chosen(cells, lambda job, method=method: job[0] == method)
        if found:
            middle = statistics.median(cell["seconds"] for cell in found.values())
            parts.append(f"{method} {middle:.0f}")
    return f"Processor seconds of a fit (median): {', '.join(parts)}."


def images_page(content: dict[str, Any]) -> str:
    """Return the tables of all configurations."""
    parts = []
    for name, cells in content["cells"].items():
        settings = content["settings"][name]
        steps, weights = (next(iter(cells.values()))[key] for key in ("steps", "weights"))
        parts += [
            f"**{TITLES.get(name, name)}**, {settings['training images'] or 'all'} training "
            f"images, {weights:,} weights, {steps:,} steps of {settings['batch size']} images; "
            "mean ± standard error over seeds:",
            best_table(name, cells),
            "By beta, first seed:",
            sweep_table(cells),
            seconds_line(cells),
        ]
    return "\n\n".join([*parts, provenance(content)]) + "\n"


# --------------------------------------------------------------------------- early stopping


def elbo(job: Job, cell: Cell, by_draws: bool) -> float:
    """Return the objective of the last epoch, nats an image; its data term may be by draws."""
    data = cell["log-likelihood by draws" if by_draws else "log-likelihood"]
    return data - job[1] * cell["KL"]


def stopping_cells(cells: Cells) -> dict[Job, Cell]:
    """Return VL and VI with the first seed, at betas that several multipliers ran with."""
    seed = first_seed(cells)
    found = chosen(cells, lambda job: job[0] != "MAP" and job[3] == seed)
    several = {job[1] for job in found if job[2] != MULTIPLIER}
    kept = {job: cell for job, cell in found.items() if job[1] in several}
    return dict(sorted(kept.items(), key=lambda item: (item[0][0], -item[0][1], item[0][2])))


def stopping_page(found: dict[Job, Cell], content: dict[str, Any]) -> str:
    """Return the table of early stopping."""
    columns = ["", "beta", "multiplier", "mean log sd / prior sd", "ELBO", "ELBO by draws"]
    columns += ["test LL", "by draws", "accuracy %", "by draws"]
    rows = []
    for job, cell in found.items():
        mean, draws = cell["scores"]["mean"], cell["scores"]["draws"]
        ratios = statistics.fmean(cell["log sigma over prior"].values())
        numbers = [ratios, elbo(job, cell, False), elbo(job, cell, True), -mean["NLL"]]
        numbers += [-draws["NLL"]]
        accuracies = [f"{100 * row['accuracy']:.1f}" for row in (mean, draws)]
        cells = [f"{number:.3f}" for number in numbers]
        rows.append([job[0], *(f"{number:g}" for number in job[1:3]), *cells, *accuracies])
    return "\n\n".join([markdown(columns, rows), provenance(content)]) + "\n"


LINES = {"mean": "-", "draws": "--"}
COLOURS = {"VL": "tab:blue", "VI": "tab:orange"}


def epochs_panel(ax: Axes, found: dict[Job, Cell], method: str, beta: float) -> None:
    """Draw the ELBO over epochs, a line for each multiplier."""
    own = {job: cell for job, cell in found.items() if job[:2] == (method, beta)}
    for shade, (job, cell) in zip((0.85, 0.6, 0.35, 0.1), own.items(), strict=False):
        curve = cell["ELBO by epoch"]
        colour = plt.get_cmap("viridis")(shade)
        ax.plot(range(1, len(curve) + 1), curve, color=colour, label=f"{job[2]:g}")
    ax.set(title=f"{method}, beta {beta:g}", xlabel="epoch", ylabel="ELBO / image")


def final_panel(
    ax: Axes,
    found: dict[Job, Cell],
    beta: float,
    title: str,
    value: Callable[[Job, Cell, str], float],
) -> None:
    """Draw a number against the multiplier, at the means and by draws."""
    for method, colour in COLOURS.items():
        own = {job: cell for job, cell in found.items() if job[:2] == (method, beta)}
        for way, line in LINES.items():
            numbers = [value(job, cell, way) for job, cell in own.items()]
            ax.plot([job[2] for job in own], numbers, line, color=colour, marker="o", markersize=4)
    ax.set(xscale="log", xlabel="multiplier", ylabel=title, title=f"beta {beta:g}")
    ticks = sorted({job[2] for job in found})
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()


FINAL: dict[str, Callable[[Job, Cell, str], float]] = {
    "test log-likelihood": lambda _, cell, way: -cell["scores"][way]["NLL"],
    "accuracy": lambda _, cell, way: cell["scores"][way]["accuracy"],
    "ELBO / image": lambda job, cell, way: elbo(job, cell, way == "draws"),
}


def stopping_figure(found: dict[Job, Cell], path: Path) -> None:
    """Draw [VL] figure 2."""
    betas = sorted({job[1] for job in found}, reverse=True)
    figure, grid = plt.subplots(
        len(betas), 5, figsize=(17, 3.3 * len(betas) + 0.5), layout="constrained", squeeze=False
    )
    for axes, beta in zip(grid, betas, strict=True):
        for ax, method in zip(axes, ("VI", "VL"), strict=False):
            epochs_panel(ax, found, method, beta)
        # The start is far below, and would hide where lines end.
        ends = [cell["ELBO by epoch"][-1] for job, cell in found.items() if job[1] == beta]
        for ax in axes[:2]:
            ax.set_ylim(3 * min(ends), 0.5 * max(ends))
        for ax, (title, value) in zip(axes[2:], FINAL.items(), strict=True):
            final_panel(ax, found, beta, title, value)
    grid[0, 0].legend(title="multiplier", fontsize="small")
    handles = [
        plt.Line2D([], [], color=colour, linestyle=line, marker="o", markersize=4)
        for colour in COLOURS.values()
        for line in LINES.values()
    ]
    names = [f"{m}, {w}" for m in COLOURS for w in ("mean network or objective", "10 draws")]
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def write(content: dict[str, Any], folder: Path) -> None:
    """Write tables and figure, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"images": images_page(content)}
    for cells in content["cells"].values():
        if found := stopping_cells(cells):
            pages["early_stopping"] = stopping_page(found, content)
            stopping_figure(found, folder / "variational_laplace_early_stopping.png")
    for name, page in pages.items():
        path = folder / f"variational_laplace_{name}.md"
        path.write_text(page)
        print(f"wrote {path}")
