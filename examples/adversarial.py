"""Unfamiliar and adversarial images: five predictions of an MNIST classifier [T 3.2.5].

A net 784-1024-1024-10 with ReLU, and dropout of 0.5 after the hidden layers, learns images whose
pixels are drawn anew each time, 1 with probability their intensity. On that one net: its plain
prediction; dropout left on; draws from Laplace approximations with Kronecker factors (damped,
[T 3.41]) and with a diagonal, N and tau of both by the cross-entropy of validation images. Many N
and tau are as good by that measure, and so there is "widest" besides: of the pairs for Kronecker
factors within 5e-4 nats of the best, the one with the highest entropy on the validation images. A
mean field of that shape with N(0, 1) priors is fitted besides, by plain draws of the weights, and
another whose standard deviations stay at 0.01.

Figure: entropy of the predictions of notMNIST's letters [T fig. 3.4]; entropy and accuracy after
one step x - eta range sign(grad log max p) [T fig. 3.5]; accuracy and p(0) over steps towards
class 0, without the images predicted 0 before [T fig. 3.6]. Attacks follow the gradient of the
averaged prediction. Every step has draws of its own: a step is never judged by the draws that it
followed.

Reduced, and in brackets the published number, which `--published` sets; where [T] gives none it is
that of the net's epochs, or all there are. The published rate is constant, ours falls by a cosine.
Images of the test set are taken in a random order, since its first half is the harder one.
{reduced}
Not said in [T], and our choice: the prior of the one net, N(0, 1), a weight decay of 1 / N (the
scale of the published 1e-2 is open); one sampled label a point for the curvature; rate and start
of the mean field; the grids for N and tau; the lengths of the untargeted step; the last 10,000
training images for validation.
"""

import argparse
import copy
import json
import time
from functools import partial
from itertools import product
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import pyro.distributions as dist
import torch
from _adversarial import (
    Binarised,
    averaged,
    in_parts,
    plot,
    targeted,
    targeted_curves,
    untargeted,
    untargeted_curves,
)
from _data import images
from _record import environment, save
from torch import nn

import tyxe
from tyxe import metrics
from tyxe.guides import AutoNormal, PretrainedInitializer

# Where there are two numbers: ours, and that of the paper.
BOTH = {
    "epochs": (25, 250),
    "first rate": (5e-2, 1e-2),
    "last rate": (5e-4, 1e-2),
    "mean-field epochs": (12, 250),
    "binarisations for the curvature": (5, 1_000),
    "validation images": (2_000, 10_000),
    "validation draws": (20, 100),
    "test images": (5_000, 10_000),
    "untargeted images": (1_000, 10_000),
    "untargeted draws": (50, 100),
    "targeted images": (200, 10_000),
    "targeted draws": (20, 100),
}
REDUCED = "\n".join(f"  {name} {ours:g} ({paper:g})" for name, (ours, paper) in BOTH.items())
# Two widths count as equally good within so many nats of validation cross-entropy.
TOLERANCE = 5e-4
ACCURACY = {
    "deterministic": 98.86,
    "MC dropout": 98.85,
    "mean field": 98.88,
    "Laplace, diag": 98.85,
    "Laplace, kron": 98.80,
}

parser = argparse.ArgumentParser(
    description=__doc__.format(reduced=REDUCED),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("--published", action="store_true", help="the published numbers, see above")
parser.add_argument("--figure", action="store_true", help="only draw the JSON in --out anew")
parser.add_argument("--seed", type=int, default=0, help="of everything (default: 0)")
parser.add_argument(
    "--out", type=Path, default=Path("results"), help="folder of figure and JSON (default: results)"
)
parser.add_argument(
    "--smoke-test", action="store_true", help="a tiny net, 200 images: seconds, no result"
)
args = parser.parse_args()
settings = {name: pair[args.published] for name, pair in BOTH.items()} | {
    "training images": 50_000,
    "hidden units": 1_024,
    "draws": 100,
    "step lengths": [0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2, 3, 5],
    "targeted step": 0.01,
    "targeted steps": 50,
    "N": [12_500, 50_000, 200_000, 800_000, 3_200_000],
    "tau": [16, 64, 256, 1_024, 4_096, 16_384, 65_536],
}
if args.smoke_test:
    counts = [name for name in BOTH if not name.endswith("rate")]
    settings |= dict.fromkeys(counts, 2)
    settings |= {"training images": 200, "hidden units": 16, "draws": 3, "targeted steps": 2}
    settings |= {"validation images": 100, "test images": 100, "N": [200, 800], "tau": [1, 64]}
    settings |= {"untargeted images": 100, "targeted images": 100}


def load():
    """Return intensities and labels for training, and binarised images to look at."""
    x, y = images("mnist", "train")
    test = images("mnist", "test")
    order = torch.randperm(len(test[0]))
    sets = {
        "validation": (x[50_000:], y[50_000:]),
        "test": tuple(part[order] for part in test),
        "notMNIST": images("notmnist", "test"),
    }
    count = settings["training images"]
    train = x[:count].flatten(1), y[:count]
    return train, {name: (x.flatten(1).bernoulli(), y) for name, (x, y) in sets.items()}


def new_net(dropout):
    """Return the net, with dropout after the hidden layers or without."""
    layers, width = [], 784
    for hidden in [settings["hidden units"]] * 2:
        layers += [nn.Linear(width, hidden), nn.ReLU(), *[nn.Dropout(0.5)] * dropout]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, 10))


def fit_net(loader):
    """Fit the net itself: no part of the library is needed for that."""
    net, epochs = new_net(dropout=True), settings["epochs"]
    how = {"lr": settings["first rate"], "momentum": 0.9, "weight_decay": 1 / len(loader.x)}
    optimizer = torch.optim.SGD(net.parameters(), **how)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, settings["last rate"])
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        schedule.step()
    return net.eval()


def fit_mean_field(loader, likelihood, **how):
    """Fit a mean field: means start at a net's own values, standard deviations at 0.01."""
    net = new_net(dropout=False)
    start = PretrainedInitializer.from_net(net)
    guide = partial(AutoNormal, init_loc_fn=start, init_scale=1e-2, **how)
    bnn = tyxe.VariationalBNN(net, tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood, guide)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-3)
    bnn.fit(loader, optimizer, settings["mean-field epochs"], progress=False)
    return bnn


def choose(bnn, n, tau):
    """Give a Laplace approximation the width of N points, in place of those seen, and of tau."""
    bnn.temperature = bnn.likelihood.dataset_size / n
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, tau**-0.5)))


def tune(bnn, x, y, letters):
    """Choose N and tau by validation images; return the best pair, the widest, and all.

    The entropy of the letters is kept beside the rest, and not looked at.
    """
    rows = []
    for n, tau in product(settings["N"], settings["tau"]):
        choose(bnn, n, tau)
        torch.manual_seed(args.seed)  # the same random numbers for all
        how = {"num_predictions": settings["validation draws"], "predictive": "bnn"}
        seen, unknown = bnn.predict(torch.cat([x, letters]), **how).tensor_split([len(x)])
        entropies = [
            metrics.predictive_entropy(logits.softmax(-1)).mean().item()
            for logits in (seen, unknown)
        ]
        score = nn.functional.cross_entropy(seen, y).item()
        row = {"N": n, "tau": tau, "cross-entropy": score}
        rows.append({**row, "entropy": entropies[0], "notMNIST entropy": entropies[1]})
    best = min(rows, key=lambda row: row["cross-entropy"])
    good = [row for row in rows if row["cross-entropy"] < best["cross-entropy"] + TOLERANCE]
    widest = max(good, key=lambda row: row["entropy"])
    choose(bnn, best["N"], best["tau"])
    return {"best": best, "widest": widest, "as good": len(good), "all": rows}


def fit_all(train, *held_out):
    """Return what each method predicts by: a module that draws anew at every call."""
    loader, likelihood = Binarised(*train, 100), tyxe.likelihoods.Categorical(len(train[0]))
    net = timed("net", fit_net, loader)
    mean_field = timed("mean field", fit_mean_field, loader, likelihood)
    methods = {"deterministic": net, "MC dropout": copy.deepcopy(net).train()}
    methods["mean field"] = mean_field.eval()
    narrow = partial(fit_mean_field, train_scale=False)
    methods["mean field, sd 0.01"] = timed("mean field, sd 0.01", narrow, loader, likelihood).eval()
    passes, chosen = settings["binarisations for the curvature"], {}
    for structure in ("diag", "kron"):
        bnn = tyxe.LaplaceBNN(
            net,
            tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            likelihood,
            structure=structure,
            curvature="fisher",
            num_passes=passes,
            damping=structure == "kron",
        )
        timed(f"curvature, {structure}", partial(bnn.fit_curvature, progress=False), loader)
        chosen[structure] = timed(f"N and tau, {structure}", tune, bnn, *held_out)
        methods[f"Laplace, {structure}"] = bnn.eval()
    widest = copy.deepcopy(bnn)
    choose(widest, *(chosen["kron"]["widest"][name] for name in ("N", "tau")))
    methods["Laplace, kron, widest"] = widest
    return methods, chosen


def look(net, sets, span, is_fixed):
    """Return a row of the table and the curves of one method."""

    def draws(name):
        return 1 if is_fixed else settings[name]

    def first(name):
        return [part[: settings[name]] for part in sets["test"]]

    with torch.no_grad():
        x, y = first("test images")
        probs = averaged(net, x, draws("draws")).exp()
        unknown = averaged(net, sets["notMNIST"][0], draws("draws")).exp()
    inside, outside = metrics.predictive_entropy(probs), metrics.predictive_entropy(unknown)
    row = {
        "accuracy %": 100 * metrics.accuracy(probs, y).item(),
        "NLL": metrics.nll(probs, y).item(),
        "entropy": inside.mean().item(),
        "notMNIST entropy": outside.mean().item(),
        "notMNIST AUROC": metrics.ood_auroc(-inside, -outside).item(),
    }
    x, y = first("untargeted images")
    etas = settings["step lengths"]
    away = in_parts(untargeted, net, x, span, etas, draws("untargeted draws"))
    x, labels = first("targeted images")
    how = settings["targeted step"], settings["targeted steps"], draws("targeted draws")
    path = in_parts(targeted, net, x, span, *how)
    grid = torch.linspace(0, 1, 101, dtype=outside.dtype)
    return row, {
        "notMNIST entropy quantiles": outside.quantile(grid).tolist(),
        "untargeted": untargeted_curves(away, y),
        "targeted": targeted_curves(path, labels),
    }


def timed(name, function, *inputs):
    """Call a function; keep its seconds, and say them."""
    start = time.perf_counter()
    found = function(*inputs)
    seconds[name] = time.perf_counter() - start
    print(f"{name}: {seconds[name]:.0f} s", flush=True)
    return found


def report():
    """Run everything; return what the JSON file holds."""
    torch.manual_seed(args.seed)
    train, sets = load()
    validation = [part[: settings["validation images"]] for part in sets["validation"]]
    methods, chosen = fit_all(train, *validation, sets["notMNIST"][0][:500])
    # A pixel is 0 or 1, but for those that no training image has.
    span = (train[0].amax(0) > 0).float()
    table, curves = {}, {}
    for name, net in methods.items():
        inputs = net, sets, span, name == "deterministic"
        table[name], curves[name] = timed(f"{name}, predictions", look, *inputs)
        cells = [f"{column} {value:.3f}" for column, value in table[name].items()]
        print(f"{name:22}" + ", ".join(cells), flush=True)
    return {
        **environment(args.seed),
        "settings": settings,
        "published settings": {name: paper for name, (_, paper) in BOTH.items()},
        "published accuracy %": ACCURACY,
        "table": table,
        "chosen": chosen,
        "seconds": seconds,
        "curves": curves,
    }


seconds = {}
written = args.out / "adversarial.json"
content = json.loads(written.read_text()) if args.figure else report()
save(args.out, "adversarial", plot(content), content)
