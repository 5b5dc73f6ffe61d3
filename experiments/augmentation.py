"""Laplace's curvature by images as they are, or as training changes them [T fig. 3.7, 3.8].

A ResNet-18 is trained on CIFAR-10's images in random windows, half of them flipped. Its curvature,
the Fisher with one drawn label an image, by Kronecker factors (damped) or a diagonal, is taken of
the training images as they are, or changed anew in each of four passes. Weights are drawn. The
posterior's width has two numbers [T 3.41]: N, the number of points that the curvature is counted
for, and tau, the prior's precision; the pair of the lowest cross-entropy of images that the net was
not trained on, or, untuned, the number of training images and 1. The notes say of the paper's
figures no more than that they compare the two curvatures; the net, images and columns are ours.
"""

from functools import partial
from itertools import product

import common
import resnet_ood
import runner
import tables
import torch
from torch import nn

import tyxe
from tyxe.plotting.axes import PALETTE

CHANGES = {"as they are": None, "changed": common.crops}
FORMS = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "entropy, right": ".2f"}
FORMS |= {"entropy, wrong": ".2f", "AUROC": ".3f"}
FORMS |= {f"training NLL, {kind}": ".2f" for kind in CHANGES} | {"diagonal's sum": ".3g"}


def choose(s, seed, bnn):
    """Give it the N and tau of the lowest cross-entropy of images that were not trained on."""
    x, y = common.images("cifar10_subset", "train")
    rows = slice(s.training_images, s.training_images + s.validation_images)
    if not len(y[rows]):
        raise SystemExit(f"no image is left after {s.training_images}: fewer --training-images")
    x, y = resnet_ood.load(s)[-1](x[rows]), y[rows]

    def cross_entropy(bnn):
        torch.manual_seed(seed)  # the same random numbers for all
        logits = bnn.predict(x, num_predictions=s.validation_draws, predictive="bnn")
        return nn.functional.cross_entropy(logits, y).item()

    return common.choose_width(bnn, s.N, s.tau, cross_entropy)


def scored(s, bnn, **how):
    torch.manual_seed(0)
    x, y = resnet_ood.prepared(s, "ten classes")[1]
    probs = bnn.predict(x, batch_size=s.batch, **how).softmax(-1)
    entropy, right = tyxe.metrics.predictive_entropy(probs), probs.argmax(-1) == y
    row, levels = tables.scores(probs, y), torch.linspace(0, 1, 101)
    for name, own in (("right", entropy[right]), ("wrong", entropy[~right])):
        row |= {f"entropy, {name}": own.mean().item()} if len(own) else {}
        row[f"quantiles, {name}"] = tables.rounded(own.quantile(levels)) if len(own) else []
    if right.any() and not right.all():
        row["AUROC"] = tyxe.metrics.ood_auroc(-entropy[right], -entropy[~right]).item()
    return row


def net_alone(s, seed):
    """Score the net itself, and of its training images the likelihood, as they are and changed."""
    bnn, (x, y) = resnet_ood.ml(s, "ten classes", seed), resnet_ood.prepared(s, "ten classes")[0]
    row = scored(s, bnn, num_predictions=0)
    for kind, change in CHANGES.items():
        probs = bnn.predict(change(x) if change else x, num_predictions=0, batch_size=s.batch)
        row[f"training NLL, {kind}"] = tyxe.metrics.nll(probs.softmax(-1), y).item()
    return row


def run(s, structure, kind, seed):
    start, (x, y) = resnet_ood.ml(s, "ten classes", seed), resnet_ood.prepared(s, "ten classes")[0]
    torch.manual_seed(seed)
    prior = common.normal(hide_module_types=[nn.BatchNorm2d])
    options = tyxe.LaplaceOptions(num_passes=s.passes, damping=structure == "kron")
    likelihood = tyxe.likelihoods.Categorical(len(y))
    how = {"structure": structure, "curvature": "fisher", "options": options}
    bnn = tyxe.LaplaceBNN(start.to_module(), prior, likelihood, **how)
    bnn.fit_curvature(common.Batches(x, y, s.batch, CHANGES[kind]), progress=False)
    drawn = {"num_predictions": s.draws, "predictive": "bnn"}
    untuned = scored(s, bnn, **drawn)
    size = {"diagonal's sum": bnn.state.curvature.operator.diagonal().sum().item()}
    chosen = choose(s, seed, bnn)
    return {"untuned": untuned | size, "tuned": scored(s, bnn, **drawn) | chosen | size}


def cells(s, found):
    for seed in s.seeds:
        yield ("net", seed), partial(net_alone, s, seed)
        for structure, kind in product(s.structures, s.curvatures):
            yield (f"{structure}, {kind}", seed), partial(run, s, structure, kind, seed)


def table(record):
    found, rows = tables.rows(record.cells), {}
    for name, own in found.items():
        rows |= {name: own} if name == "net" else {name: [cell["tuned"] for cell in own]}
        if name != "net":
            rows[f"{name}, untuned"] = [cell["untuned"] for cell in own]
    return tables.score_table(rows, FORMS, count=["seeds"])


def figure(record):
    """Draw the first seed's entropies: a panel for each kind of curvature, the net in both."""
    found, above = tables.rows(record.cells), torch.linspace(1, 0, 101)
    drawn, axes = tables.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for ax, kind in zip(axes, CHANGES, strict=True):
        rows = {"net": found["net"][0]}
        for structure in ("diag", "kron"):
            if own := found.get(f"{structure}, {kind}"):
                rows[structure] = own[0]["tuned"]
        for (name, row), color in zip(rows.items(), PALETTE, strict=False):
            for part, line in (("right", "solid"), ("wrong", "dashed")):
                levels, look = row[f"quantiles, {part}"], {"color": color, "linestyle": line}
                ax.plot(levels, above[: len(levels)], label=f"{name}, {part}", **look)
        ax.set(title=f"curvature of images {kind}", xlabel="predictive entropy (nats)")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("fraction of test images above")
    look = {"frameon": False, "fontsize": "small", "loc": "center left"}
    axes[1].legend(**look, bbox_to_anchor=(1, 0.5))
    return drawn


experiment = runner.Experiment("augmentation", cells, table, figure, ("row", "seed"))
