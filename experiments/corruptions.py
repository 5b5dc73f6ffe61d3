"""Corrupted images, which inducing weights and others were not trained on [T 4.2.4].

The nets and fits are those of `inducing_images.py` at its settings: a deterministic net, an
ensemble of five, mean fields of the weights (FFG-W) and of inducing weights (FFG-U), an ensemble of
these (ensemble-U). Test images of FashionMNIST, the same for all, are corrupted in six ways at five
levels. First table: means over the ways, by level, 0 being the images as they are; second: means
over the levels, by way; in brackets [T], a ResNet-50 on CIFAR-10 and 19 ways.
"""

import math
import statistics
from functools import cache
from itertools import product

import inducing_images
import pyro
import runner
import tables
import torch
import torch.nn.functional as F
from inducing_images import blurred, flattened

METHODS = ["plain", "FFG-W", "FFG-U", "ensemble-U"]
SCORES = {"accuracy %": ".1f", "NLL": ".2f", "ECE %": ".1f"}
LEVELS = range(6)
# [T], at levels 1, 3 and 5.
PAPER = {
    "deterministic": ((88, 76, 58), (10, 21, 37)),
    "ensemble": ((89, 78, 60), (4, 10, 20)),
    "FFG-W": ((84, 69, 51), (13, 12, 11)),
    "FFG-U": ((87, 74, 57), (2, 8, 16)),
    "ensemble-U": ((87, 74, 55), (3, 9, 20)),
}


@cache
def nets(s):
    """Return the settings of the nets and of their fits."""
    levels = ["published"] * s.published + ["smoke"] * s.smoke_test
    return inducing_images.experiment.at(*levels, device=s.device)


def noisy(x, sd):
    own = torch.Generator().manual_seed(round(1000 * sd))
    return (x + sd * torch.randn(x.shape, generator=own).to(x)).clamp(0, 1)


def pixelated(x, share):
    """Return images of the same size with that share of the pixels of each side."""
    small = F.interpolate(x, scale_factor=share, mode="area")
    return F.interpolate(small, x.shape[-2:], mode="area")


def rounded_cosines(x, step):
    """Return images whose cosine coefficients are multiples of `step (1 + u + v)`, by frequency."""
    own = F.pad(x, (0, -x.shape[-1] % 8, 0, -x.shape[-2] % 8), "replicate")
    index = torch.arange(8.0)
    basis = (math.pi / 8 * (index + 0.5) * index[:, None]).cos() / 2
    basis[0] /= math.sqrt(2)  # orthogonal: rows are frequencies
    steps = (step * (1 + index + index[:, None])).to(x)
    blocks = own.unfold(-2, 8, 8).unfold(-2, 8, 8)  # (..., rows, columns, 8, 8)
    basis = basis.to(x)
    kept = basis.mT @ ((basis @ blocks @ basis.mT / steps).round() * steps) @ basis
    kept = kept.movedim(-2, -3).flatten(-2).flatten(-3, -2)
    return kept[..., : x.shape[-2], : x.shape[-1]].clamp(0, 1)


# Each with its strengths at levels 1 to 5.
CORRUPTIONS = {
    "noise": (noisy, (0.04, 0.08, 0.12, 0.18, 0.25)),
    "blur": (blurred, (0.5, 0.75, 1.0, 1.3, 1.6)),
    "brightness": (lambda x, more: (x + more).clamp(0, 1), (0.1, 0.175, 0.25, 0.325, 0.4)),
    "contrast": (flattened, (0.7, 0.55, 0.4, 0.3, 0.2)),
    "pixels": (pixelated, (0.8, 0.65, 0.5, 0.4, 0.3)),
    "JPEG": (rounded_cosines, (0.03, 0.06, 0.1, 0.15, 0.25)),
}


def scored(s, bnns):
    """Return scores of the images as they are, and by way, of the levels, if corrupted."""
    chosen = nets(s)
    _, test, _, normalise = inducing_images.load(chosen)
    x, y = (part[:: max(len(part) // s.images, 1)][: s.images] for part in test)

    def judged(x):
        draws = {"num_predictions": 1 if bnns[0].net_guide is None else chosen.draws}
        each = [bnn.predict(normalise(x), batch_size=500, **draws) for bnn in bnns]
        row = tables.scores(torch.stack(each).softmax(-1).mean(0), y, 10)
        return {name: round(value, 4) for name, value in row.items()}

    found = {}
    for way, (change, strengths) in CORRUPTIONS.items():
        rows = [judged(change(x, strength)) for strength in strengths]
        found[way] = {score: [row[score] for row in rows] for score in SCORES}
    return judged(x) | {"corrupted": found}


def run(s, method, seed):
    pyro.set_rng_seed(seed)
    chosen, is_plain = nets(s), method == "plain"
    plan = chosen.deterministic if is_plain else chosen.inducing
    plan = chosen.weights if method == "FFG-W" else plan
    bnns = []
    for _ in range(chosen.members if is_plain else 1):
        bnns.append(inducing_images.make_bnn(chosen, "deterministic" if is_plain else method))
        inducing_images.fit(chosen, bnns[-1], plan)
    if is_plain:
        return {"rows": {"deterministic": scored(s, bnns[:1]), "ensemble": scored(s, bnns)}}
    return {"rows": {method: scored(s, bnns)}}


def by_level(row, score):
    """Return the mean over the ways at each level, from 0 on."""
    each = [row["corrupted"][way][score] for way in CORRUPTIONS]
    return [row[score], *map(statistics.fmean, zip(*each, strict=True))]


def table(record):
    rows, blocks = tables.rows(record.cells), []
    for score, (name, form) in zip((0, None, 1), SCORES.items(), strict=True):
        lines = []
        for row, found in rows.items():
            levels = [by_level(seed, name) for seed in found]
            texts = [tables.over_seeds(list(at), form) for at in zip(*levels, strict=True)]
            for level, place in ((1, 0), (3, 1), (5, 2)) if score is not None else ():
                texts[level] += f" ({PAPER[row][score][place]})"
            lines.append([row, *texts])
        blocks.append(tables.markdown([name, *(f"level {i}" for i in LEVELS)], lines))
    for name, form in SCORES.items():
        lines = []
        for row, found in rows.items():
            own = [
                [statistics.fmean(seed["corrupted"][way][name]) for seed in found]
                for way in CORRUPTIONS
            ]
            lines.append([row, *(tables.over_seeds(values, form) for values in own)])
        blocks.append(tables.markdown([f"{name}, all levels", *CORRUPTIONS], lines))
    return "\n\n".join(blocks)


def figure(record):
    shape = len(SCORES), len(CORRUPTIONS)
    drawn, axes = tables.subplots(*shape, figsize=(13, 6.5), sharex=True, sharey="row")
    panels = zip(axes.flat, product(SCORES, CORRUPTIONS), strict=True)
    for ax, (score, way) in panels:
        for row, found in tables.rows(record.cells).items():
            levels = [[seed[score], *seed["corrupted"][way][score]] for seed in found]
            values = [*zip(*levels, strict=True)]
            tables.errorbar(ax, LEVELS, values, label=row, marker="o", markersize=3, capsize=2)
        ax.set(title=way if ax in axes[0] else "", xlabel="level", ylabel=score)
        ax.label_outer()
    drawn.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawn


cells, of_nets = runner.every(run, method="methods", seed="seeds"), inducing_images.experiment
facts = {"default settings of the nets": of_nets.recorded(of_nets.at())}
experiment = runner.Experiment("corruptions", cells, table, figure, facts=facts)
