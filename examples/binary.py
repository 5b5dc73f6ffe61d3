"""Nets of binary weights on MNIST, and what they know of FashionMNIST.

After [T 4.1.3, tab. 4.2, fig. 4.4]: the convolutional net Conv64 - MaxPool - Tanh - Conv128 -
MaxPool - Tanh - Linear2048 - Tanh - Linear10 and, in addition, the fully connected one of permuted
MNIST, 784-100-100-10 (tanh), both without biases. Weights are 1 / sqrt(fan_in) or its negative.

Rows: the net of real weights that all others start from; deterministic signs trained by the
straight-through estimator (STE, real weights clipped to [-1, 1]), scores averaged over the eight
nets of the ensemble (STE ensemble), whose starts differ; Bernoulli posteriors with the KL weighed
by tau; and Beta(1 + delta, 1 + delta) regularised probabilities, weighed by 1. Predictions average
8 draws of binary nets. Columns: accuracy, negative log-likelihood (NLL, nats an image), expected
calibration error (15 bins), mean predictive entropy on FashionMNIST (nats; log 10 = 2.30), area
under the ROC curve by that entropy, mean entropy of a weight (log 2 = 0.693), and NLL of as many
training images. Mean and standard error over seeds, [T tab. 4.2] in brackets.

The figure, of the convolutional net: (a) calibration over all class probabilities; (b) share of
FashionMNIST images with predictive entropy below v; (c) accuracy on test and FashionMNIST images
together where the confidence is at least c, those of FashionMNIST being always wrong.

Reduced for a CPU, in brackets what --published sets: widths 16-32-256 (64-128-2048), 10,000
training images (60,000), 7 epochs (200), the rate a tenth after half and three quarters of them
(Bernoulli and Beta 1/8, 5/8; STE 2/5, 4/5), 2,000 test images of each set (10,000), 2 seeds (8,
ensembles 4). Batches of 50 (100) and 3 epochs (20) of the net of real weights are our choice. A run
with the same settings leaves out what the JSON in --out holds already.
"""

import argparse
import json
import time
from functools import cache, partial
from pathlib import Path

import _extras  # noqa: F401
import torch
from _binary import NETS, batches, by_sign_, fit, probabilities, stepwise, weight_entropy
from _binary_report import ROWS, curves, figure, mean_of, scores, summary, table
from _data import images
from _record import environment, recorded

import tyxe

PUBLISHED = {
    "training images": 60_000,
    "test images": 10_000,
    "widths": {"cnn": [64, 128, 2048], "mlp": [100, 100]},
    "epochs of real weights": 20,
    "epochs": 200,
    "batch": 100,
    "rate": {"STE": 0.1, "Bernoulli": 0.1},
    "decays": {"STE": [0.4, 0.8], "Bernoulli": [0.125, 0.625]},
    "draws": 8,
    "members": 8,
    "seeds": 8,
    "seeds of ensembles": 4,
}
REDUCED = PUBLISHED | {
    "training images": 10_000,
    "test images": 2_000,
    "widths": {"cnn": [16, 32, 256], "mlp": [100, 100]},
    "epochs of real weights": 3,
    "epochs": 7,
    "batch": 50,
    "decays": {"STE": [0.5, 0.75], "Bernoulli": [0.5, 0.75]},
    "seeds": 2,
    "seeds of ensembles": 2,
}
SMOKE = REDUCED | {
    "training images": 60,
    "test images": 40,
    "widths": {"cnn": [2, 3, 4], "mlp": [5, 4]},
    "epochs": 2,
    "batch": 20,
    "draws": 2,
    "members": 2,
    "seeds": 1,
    "seeds of ensembles": 1,
}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--net", nargs="+", choices=NETS, default=list(NETS), help="default: both")
parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
parser.add_argument("--seeds", type=int, help="at most so many seeds (default: see above)")
parser.add_argument("--published", action="store_true", help="the published settings, see above")
parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--figure", action="store_true", help="only draw the figure of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
parser.add_argument("--smoke-test", action="store_true", help="tiny nets, few images: no result")
args = parser.parse_args()
settings = SMOKE if args.smoke_test else PUBLISHED if args.published else REDUCED
settings = settings | {"published": args.published}
path = args.out / f"binary_mnist{'_published' if args.published else ''}.json"
torch.set_num_threads(1)


@cache
def data():
    """Return training images, test images, and those of FashionMNIST."""
    sets = images("mnist", "train"), images("mnist", "test"), images("fashion_mnist", "test")
    counts = [settings[f"{kind} images"] for kind in ("training", "test", "test")]
    return [
        [tensor[:count].to(args.device) for tensor in pair]
        for pair, count in zip(sets, counts, strict=True)
    ]


def loader():
    """Return batches of the training images."""
    return batches(*data()[0], settings["batch"])


@cache
def real_net(kind, seed):
    """Return the fitted net of real weights."""
    torch.manual_seed(seed)
    net = NETS[kind](settings["widths"][kind]).to(args.device)
    return fit(net, loader(), settings["epochs of real weights"], 1e-3)


def straight_through(kind, seed):
    """Return a net of deterministic signs."""
    net = NETS[kind](settings["widths"][kind]).to(args.device)
    net.load_state_dict(real_net(kind, seed).state_dict())
    torch.manual_seed(seed)
    how = (settings["epochs"], settings["rate"]["STE"], settings["decays"]["STE"])
    return fit(by_sign_(net), loader(), *how, clip=True)


def bernoulli(kind, seed, delta=None, tau=1.0):
    """Return a BNN of binary weights."""
    prior = tyxe.priors.BinaryPrior(delta, scale="radford")
    likelihood = tyxe.likelihoods.Categorical(len(data()[0][0]))
    net = real_net(kind, seed)
    torch.manual_seed(seed)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoBernoulli)
    adam = torch.optim.Adam(bnn.parameters(), lr=settings["rate"]["Bernoulli"])
    epochs = settings["epochs"]
    schedule = stepwise(adam, epochs, settings["decays"]["Bernoulli"])
    with tyxe.poutine.local_reparameterization():
        bnn.fit(loader(), adam, epochs, lambda *_: schedule.step(), beta=tau, progress=False)
    return bnn


def judged(predict):
    """Return scores and curves of a function from images to class probabilities."""
    (seen, labels), (x, y), (unknown, _) = data()
    known, unknown, y = predict(x).cpu(), predict(unknown).cpu(), y.cpu()
    training = tyxe.metrics.nll(predict(seen[: len(x)]), labels[: len(x)]).item()
    found = {**scores(known, y, unknown), "training NLL": training}
    return found | {"curves": curves(known, y, unknown)}


def run_ensemble(kind, seed):
    """Return what is said of an ensemble, and of its nets on average."""
    members = settings["members"]
    nets = [straight_through(kind, members * seed + member) for member in range(members)]
    each = [judged(partial(probabilities, net)) for net in nets]
    together = judged(lambda x: torch.stack([probabilities(net, x) for net in nets]).mean(0))
    return {"STE": mean_of(each), "STE ensemble": together}


def run(kind, row, seed):
    """Return what a run finds, by row."""
    how = ROWS[row]
    first = settings["members"] * seed
    if row.startswith("STE"):
        return run_ensemble(kind, seed)
    if how is None:
        return {row: judged(partial(probabilities, real_net(kind, first)))}
    bnn = bernoulli(kind, first, **how)
    draws = {"num_predictions": settings["draws"], "batch_size": 500}
    found = judged(lambda x: bnn.predict(x, **draws).softmax(-1))
    mean, by_site = weight_entropy(bnn)
    return {row: found | {"weight entropy": mean, "weight entropy by site": by_site}}


def earlier():
    """Return cells and commands of earlier runs."""
    content = recorded(path, settings)
    if not content:
        return {kind: {row: {} for row in ROWS} for kind in NETS}, []
    return content["cells"], content["commands"]


def missing(cells):
    """Yield nets, rows and seeds that are not there yet."""
    for seed in range(max(settings["seeds"], settings["seeds of ensembles"])):
        for kind in args.net:
            for row in args.rows:
                name = "seeds of ensembles" if row.startswith("STE") else "seeds"
                wanted = seed < min(settings[name], args.seeds or settings[name])
                if wanted and str(seed) not in cells[kind][row]:
                    yield kind, row, seed


def main():
    """Run what is missing, writing the JSON after each cell."""
    cells, commands = earlier()
    args.out.mkdir(parents=True, exist_ok=True)
    about = environment(None, commands)
    while (cell := next(missing(cells), None)) is not None:
        kind, row, seed = cell
        start = time.process_time()
        for name, found in run(kind, row, seed).items():
            found["CPU seconds"] = round(time.process_time() - start, 1)
            cells[kind][name][str(seed)] = found
            line = f"{kind}, {name}, seed {seed}: {found['accuracy %']:.2f} %"
            print(f"{line}, NLL {found['NLL']:.3f}, {found['CPU seconds']:.0f} s", flush=True)
        content = {**about, "settings": settings}
        content |= {"published settings": PUBLISHED, "summary": summary(cells), "cells": cells}
        path.write_text(json.dumps(content, indent=1) + "\n")


if not (args.table or args.figure):
    main()
elif not path.exists():
    parser.error(f"there is no {path}; run without --table and --figure first")
if not args.table:
    figure(json.loads(path.read_text()), path.with_suffix(".png"))
print(table(json.loads(path.read_text())))
