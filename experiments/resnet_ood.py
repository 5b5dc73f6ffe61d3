"""What a ResNet-18 on CIFAR-10 tells from its images, and on what that depends [T tab. 5.1].

`resnet_ood`: in [T] a posterior over all weights raises the area under the ROC curve (AUROC)
against SVHN; in the reduced runs of `resnet.py` it does not. One thing is changed at a time: the
other images, the training images, the labels, the posterior's width.

Setups: `ten classes`; `a quarter`, of the training images, for as many steps; `two classes`, the
same images labelled animal or vehicle; `four times the steps`, of ml alone. Rows: a net, ml, and
the same trained for as long again as mean field is (ml, longer); about ml Laplace over its last
layer, and by Kronecker factors over all weights, linearised; mean field, standard deviations capped
at 0.05 or at 0.1, or with the KL weighed by 0.02, as that of variational Laplace is there; and
that; and the first mean field about ml, longer. Mean fields are predicted as they were fitted,
within local reparameterisation, and by weights drawn; variational Laplace by the mean network.

Other images: SVHN normalised by its own statistics, as in [T], or by CIFAR-10's; notMNIST and
FashionMNIST in two random colours an image; Gaussian noise; test images whose patches are shuffled.
Second table, SVHN by its own statistics: its AUROC against test images that the net has right and
wrong; mean confidence in the three; NLL of half as many training images; share of standard
deviations at their cap. Third, by the net that a mean field starts at: by how much that overfits,
its test less its training NLL, and the rise of AUROC from it.

`augmentation` [T fig. 3.7, 3.8]: the curvature by images as they are, or as training changes them.
A ResNet-18 is trained on CIFAR-10's images in random windows, half of them flipped. Its curvature,
the Fisher with one drawn label an image, by Kronecker factors (damped) or a diagonal, is taken of
the training images as they are, or changed anew in each of four passes. Weights are drawn. The
posterior's width has two numbers [T 3.41]: N, the number of points that the curvature is counted
for, and tau, the prior's precision; the pair of the lowest cross-entropy of images that the net was
not trained on, or, untuned, the number of training images and 1. The notes say of the paper's
figures no more than that they compare the two curvatures; the net, images and columns are ours.
"""

from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import common
import resnet
import runner
import tables
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tyxe import LaplaceBNN, VariationalBNN, metrics
from tyxe.plotting.axes import PALETTE
from tyxe.poutine import local_reparameterization

SETUPS = {"ten classes": {}, "a quarter": {"parts": 4}, "two classes": {"kinds": True}}
SETUPS |= {"four times the steps": {"longer": 4}}
# Caps and weights of the KL of mean fields.
FIELDS = {"mean field": (0.05, 1.0), "mean field about ml, longer": (0.05, 1.0)}
FIELDS |= {"mean field, cap 0.1": (0.1, 1.0), "mean field, KL x 0.02": (0.05, 0.02)}
# The nets that the mean fields of the third table start at.
STARTS = {"mean field": "ml", "mean field about ml, longer": "ml, longer"}
LAPLACE = {"last-layer Laplace": "full", "Kronecker Laplace": "kron"}
ROWS = ["ml", "ml, longer", *LAPLACE, *FIELDS, "variational Laplace"]
VEHICLES = (0, 1, 8, 9)  # airplane, automobile, ship, truck
SCORES = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f"}
PARTS = dict.fromkeys(("AUROC, right", "AUROC, wrong"), ".3f")
PARTS |= {f"confidence, {name}": ".3f" for name in ("right", "wrong", "SVHN")}
PARTS |= {"training NLL": ".3f", "at cap": ".2f"}


def coloured(x, size):
    """Return grey images of a size, black and white in them being two random colours each."""
    x = F.interpolate(x, (size, size), mode="bilinear", align_corners=False)
    black, white = torch.rand(2, len(x), 3, 1, 1)
    return black + x * (white - black)


def shuffled(x, patch):
    """Return images whose square patches have other places, in each image others."""
    side = x.shape[-1] // patch
    patches = F.unfold(x, patch, stride=patch)
    order = torch.rand(len(x), 1, side * side).argsort(-1).expand_as(patches)
    return F.fold(patches.gather(-1, order), x.shape[-2:], patch, stride=patch)


def load(s):
    """Return training and test pairs, and the function that normalises images."""
    train, (x, y) = (common.images("cifar10_subset", split) for split in ("train", "test"))
    train = common.first(train, s.training_images)
    test = common.thinned(x, s.test_images), common.thinned(y, s.test_images)
    return train, test, common.standardised(train[0])


@cache
def other_images(s):
    """Return images of other kinds by name, all normalised."""
    (x, _), normalise = load(s)[1:]
    svhn = torch.cat([common.images("svhn_subset", split)[0] for split in ("test", "train")])
    svhn, own = common.thinned(svhn, s.other_images), common.standardised(svhn)
    few = partial(common.thinned, count=s.other_images)
    with torch.random.fork_rng(devices=[]):  # a seed set before is that of the fit
        torch.manual_seed(0)
        others = {"SVHN": own(svhn), "SVHN, CIFAR's statistics": normalise(svhn)}
        for name, title in (("notmnist", "notMNIST"), ("fashion_mnist", "FashionMNIST")):
            others[title] = normalise(coloured(few(common.images(name, "test")[0]), 32))
        others["noise"] = torch.randn_like(others["SVHN"])
        others["shuffled"] = normalise(shuffled(few(x), 8))
    return others


@cache
def prepared(s, setup):
    """Return the training and test pairs of a setup."""
    train, test, normalise = load(s)
    train, test = ((normalise(x), y) for x, y in (train, test))
    train = tuple(part[:: SETUPS[setup].get("parts", 1)] for part in train)
    if "kinds" not in SETUPS[setup]:
        return train, test
    return [(x, torch.isin(y, torch.tensor(VEHICLES)).long()) for x, y in (train, test)]


def fit(s, bnn, pair, steps, handler=nullcontext, cut=(), **how):
    batches = common.Batches(*pair, s.batch, common.crops)
    epochs, adam = max(1, steps // len(batches)), partial(torch.optim.Adam, lr=s.rate)
    cuts = common.cut_at(*(round(share * epochs) for share in cut))
    with handler():
        bnn.fit(batches, adam, epochs, cuts, progress=False, **how)
    return bnn


def plain(net, pair):
    likelihood = tyxe.likelihoods.Categorical(len(pair[1]))
    return VariationalBNN(net, common.normal(hide_all=True), likelihood)


@cache
def ml(s, setup, seed):
    """Return the net that all others start at."""
    torch.manual_seed(seed)
    (train, _), net = prepared(s, setup), resnet.make_net(s.width, s.stem)
    steps = s.steps * SETUPS[setup].get("longer", 1)
    return fit(s, plain(net, train), train, steps, cut=[2 / 3])


@cache
def ml_longer(s, setup, seed):
    """Return ml trained for as long again as mean field is."""
    net, train = ml(s, setup, seed).to_module(), prepared(s, setup)[0]
    torch.manual_seed(seed)
    return fit(s, plain(net, train), train, s.mean_field_steps)


NETS = {"ml": ml, "ml, longer": ml_longer}


def scored(s, bnn, test, seen, **how):
    """Return a row: scores of test images, and what of the others is told from them."""
    torch.manual_seed(0)

    def predict(x):
        return bnn.predict(x, batch_size=s.batch, **how).softmax(-1)

    known, (x, y) = predict(test[0]), test
    row, confidence, right = tables.scores(known, y), known.amax(-1), known.argmax(-1) == y
    others = {name: predict(x).amax(-1) for name, x in other_images(s).items()}
    for name, unknown in others.items():
        row[f"AUROC {name}"] = metrics.ood_auroc(confidence, unknown).item()
    parts = {"right": confidence[right], "wrong": confidence[~right], "SVHN": others["SVHN"]}
    for name, part in parts.items():
        if len(part):
            row[f"confidence, {name}"] = part.mean().item()
            row[f"AUROC, {name}"] = metrics.ood_auroc(part, others["SVHN"]).item()
    x, y = common.first(seen, len(x) // 2)
    row["training NLL"] = metrics.nll(predict(x), y).item()
    return {name: round(value, 4) for name, value in row.items()}


def at_cap(bnn, cap):
    scales = [q.stddev.flatten() for q in bnn.net_guide.get_detached_distributions().values()]
    return (torch.cat(scales) > 0.95 * cap).float().mean().item()


def run(s, setup, row, seed):
    (train, test), how = prepared(s, setup), {"num_predictions": s.draws}
    if row in NETS:
        return scored(s, NETS[row](s, setup, seed), test, train, num_predictions=0)
    start = NETS[STARTS.get(row, "ml")](s, setup, seed)
    net, likelihood = start.to_module(), tyxe.likelihoods.Categorical(len(train[1]))
    weights = common.normal(hide_module_types=[nn.BatchNorm2d])
    torch.manual_seed(seed)
    if row == "variational Laplace":
        bnn, handler = resnet.inference(s, "variational-laplace", net, likelihood)
        weighed = {"beta": 0.02, "lr_multipliers": {"scale": s.scale_multiplier}}
        fit(s, bnn, train, s.mean_field_steps, handler, **weighed)
        return scored(s, bnn, test, train, num_predictions=0)
    if row in LAPLACE:
        prior = weights if LAPLACE[row] == "kron" else common.normal(expose=["fc.*"])
        bnn = LaplaceBNN(net, prior, likelihood, structure=LAPLACE[row])
        bnn.fit_curvature(common.Batches(*train, s.batch), progress=False)
        bnn.optimize_prior_precision()
        return scored(s, bnn, test, train, **how)
    cap, beta = FIELDS[row]
    guide = common.mean_field(net, init_scale=1e-4, max_guide_scale=cap)
    bnn = VariationalBNN(net, weights, likelihood, guide)
    weighed = {"beta": beta, "lr_multipliers": {"scale": s.scale_multiplier}}
    fit(s, bnn, train, s.mean_field_steps, local_reparameterization, **weighed)
    with local_reparameterization():
        cell = scored(s, bnn, test, train, **how) | {"at cap": at_cap(bnn, cap)}
    return cell | {"weights drawn": scored(s, bnn, test, train, **how)}


def rises(record):
    """Return, by setup and start, what each seed's mean field has of AUROC above its start."""
    found = {}
    for setup, (row, start) in product(SETUPS, STARTS.items()):
        for (seed,), field in record.of(setup, row).items():
            if net := record.cells.get((setup, start, seed)):
                gap = {"test - training NLL": net["NLL"] - net["training NLL"]}
                rise = {k: field[k] - net[k] for k in net if k.startswith("AUROC ")}
                found.setdefault((setup, start), []).append(gap | rise)
    return found


def table(record):
    blocks = []
    for setup in SETUPS:
        found, rows = tables.rows(record.of(setup)), {}
        for row in (row for row in ROWS if row in found):
            drawn = [cell["weights drawn"] for cell in found[row] if "weights drawn" in cell]
            rows |= {row: found[row]} | ({f"{row}, weights drawn": drawn} if drawn else {})
        if rows:
            first = next(iter(rows.values()))[0]
            auroc = [column for column in first if column.startswith("AUROC ")]
            forms = SCORES | dict.fromkeys(auroc, ".3f")
            blocks.append(f"**{setup.capitalize()}**")
            blocks += [tables.score_table(rows, each, count=["seeds"]) for each in (forms, PARTS)]
    if found := rises(record):
        forms = dict.fromkeys(next(iter(found.values()))[0], ".3f")
        rise = tables.score_table(found, forms, count=["start", "seeds"])
        blocks += ["**Mean field less its start**", rise]
    return "\n\n".join(blocks)


cells = runner.every(run, setup="setups", row="rows", seed="seeds")
choices = {"setups": SETUPS, "rows": ROWS}
experiment = runner.Experiment("resnet_ood", cells, table, choices=choices)

# --------------------------------------------------------------------------- changed images

CHANGES = {"as they are": None, "changed": common.crops}
AUGMENTED = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "entropy, right": ".2f"}
AUGMENTED |= {"entropy, wrong": ".2f", "AUROC": ".3f"}
AUGMENTED |= {f"training NLL, {kind}": ".2f" for kind in CHANGES} | {"diagonal's sum": ".3g"}


def choose(s, seed, bnn):
    """Give it the N and tau of the lowest cross-entropy of images that were not trained on."""
    x, y = common.images("cifar10_subset", "train")
    rows = slice(s.training_images, s.training_images + s.validation_images)
    if not len(y[rows]):
        raise SystemExit(f"no image is left after {s.training_images}: fewer --training-images")
    x, y = load(s)[-1](x[rows]), y[rows]

    def cross_entropy(bnn):
        torch.manual_seed(seed)  # the same random numbers for all
        logits = bnn.predict(x, num_predictions=s.validation_draws, predictive="bnn")
        return nn.functional.cross_entropy(logits, y).item()

    return common.choose_width(bnn, s.N, s.tau, cross_entropy)


def told_apart(s, bnn, **how):
    torch.manual_seed(0)
    x, y = prepared(s, "ten classes")[1]
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
    bnn, (x, y) = ml(s, "ten classes", seed), prepared(s, "ten classes")[0]
    row = told_apart(s, bnn, num_predictions=0)
    for kind, change in CHANGES.items():
        probs = bnn.predict(change(x) if change else x, num_predictions=0, batch_size=s.batch)
        row[f"training NLL, {kind}"] = tyxe.metrics.nll(probs.softmax(-1), y).item()
    return row


def run_curvature(s, structure, kind, seed):
    start, (x, y) = ml(s, "ten classes", seed), prepared(s, "ten classes")[0]
    torch.manual_seed(seed)
    prior = common.normal(hide_module_types=[nn.BatchNorm2d])
    options = tyxe.LaplaceOptions(num_passes=s.passes, damping=structure == "kron")
    likelihood = tyxe.likelihoods.Categorical(len(y))
    how = {"structure": structure, "curvature": "fisher", "options": options}
    bnn = tyxe.LaplaceBNN(start.to_module(), prior, likelihood, **how)
    bnn.fit_curvature(common.Batches(x, y, s.batch, CHANGES[kind]), progress=False)
    drawn = {"num_predictions": s.draws, "predictive": "bnn"}
    untuned = told_apart(s, bnn, **drawn)
    size = {"diagonal's sum": bnn.state.curvature.operator.diagonal().sum().item()}
    chosen = choose(s, seed, bnn)
    return {"untuned": untuned | size, "tuned": told_apart(s, bnn, **drawn) | chosen | size}


def cells_of_curvatures(s, found):
    for seed in s.seeds:
        yield ("net", seed), partial(net_alone, s, seed)
        for structure, kind in product(s.structures, s.curvatures):
            yield (f"{structure}, {kind}", seed), partial(run_curvature, s, structure, kind, seed)


def table_of_curvatures(record):
    found, rows = tables.rows(record.cells), {}
    for name, own in found.items():
        rows |= {name: own} if name == "net" else {name: [cell["tuned"] for cell in own]}
        if name != "net":
            rows[f"{name}, untuned"] = [cell["untuned"] for cell in own]
    return tables.score_table(rows, AUGMENTED, count=["seeds"])


def figure_of_curvatures(record):
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


parts = cells_of_curvatures, table_of_curvatures, figure_of_curvatures, ("row", "seed")
augmentation = runner.Experiment("augmentation", *parts)
