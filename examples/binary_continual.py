"""Binary weights on permuted MNIST: the posterior of each task is the prior of the next.

After [T fig. 4.5-4.6]: ten tasks, each MNIST with pixels permuted in its own way, one after the
other by one net 784-100-100-10 (tanh, no biases) of weights 1 / sqrt(fan_in) or its negative.

Rows: Bernoulli posteriors, the KL weighed by tau; the same after a first task of Beta(1 + delta,
1 + delta) regularised probabilities (that term weighed by 1, the KL from the second task on by
tau); and signs trained by the straight-through estimator (STE), which has no prior, its real
weights clipped to [-1, 1] or not. All start from a net of real weights fitted to the first task.
tau is stated nowhere in the source: Bernoulli has three, and Beta the one in their middle, 0.1,
where no other is said.

The figure and the table have the accuracy, averaged over the tasks seen, on the first and on the
newest task, after each task; and the mean entropy of a weight of each layer (log 2 = 0.693).

Reduced for a CPU, in brackets what --published sets: 8,000 training images a task (60,000), 8
epochs a task (200) at a rate of 0.1 (0.01, by which logits do not get far in so few steps), in
both a tenth of it after half of them, 2,000 test images a task (10,000), 2 seeds (8). Batches of
100 and 3 epochs of the net of real weights (20) are our choice. Predictions average 8 draws. A run
with the same settings leaves out what the JSON in --out holds.
"""

import argparse
import json
import time
from functools import cache, partial
from pathlib import Path

import _extras  # noqa: F401
import torch
from _binary import (
    batches,
    by_sign_,
    fit,
    fully_connected,
    probabilities,
    stepwise,
    weight_entropy,
)
from _binary_tasks import ROWS, figure, table
from _data import images
from _record import environment, recorded

import tyxe

PUBLISHED = {
    "tasks": 10,
    "training images": 60_000,
    "test images": 10_000,
    "widths": [100, 100],
    "epochs of real weights": 20,
    "epochs": 200,
    "batch": 100,
    "rate": 0.01,
    "decays": [0.5],
    "draws": 8,
    "seeds": 8,
}
REDUCED = PUBLISHED | {
    "training images": 8_000,
    "test images": 2_000,
    "epochs of real weights": 3,
    "epochs": 8,
    "rate": 0.1,
    "seeds": 2,
}
SMOKE = REDUCED | {
    "tasks": 3,
    "training images": 60,
    "test images": 40,
    "widths": [5, 4],
    "epochs": 2,
    "batch": 20,
    "draws": 2,
    "seeds": 1,
}

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="default: all")
parser.add_argument("--seeds", type=int, help="number of seeds (default: 2, published 8)")
parser.add_argument("--published", action="store_true", help="the published settings, see above")
parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--figure", action="store_true", help="only draw the figure of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
parser.add_argument("--smoke-test", action="store_true", help="few small tasks: no result")
args = parser.parse_args()
settings = SMOKE if args.smoke_test else PUBLISHED if args.published else REDUCED
path = args.out / f"binary_continual{'_published' if args.published else ''}.json"
torch.set_num_threads(1)


@cache
def data(split):
    """Return flat images and labels."""
    x, y = images("mnist", split)
    count = settings["training images" if split == "train" else "test images"]
    return x[:count].flatten(1).to(args.device), y[:count].to(args.device)


def tasks(seed):
    """Return a permutation of the pixels for each task."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(784, generator=generator) for _ in range(settings["tasks"])]


def loader(permutation):
    """Return a task's batches."""
    x, y = data("train")
    return batches(x[:, permutation], y, settings["batch"])


def accuracies(predict, seen):
    """Return the accuracy of class probabilities on each of the tasks seen, in %."""
    x, y = data("test")
    found = [tyxe.metrics.accuracy(predict(x[:, permutation]), y) for permutation in seen]
    return [round(100 * accuracy.item(), 3) for accuracy in found]


def real_net(permutation, seed):
    """Return a net of real weights, fitted to one task."""
    torch.manual_seed(seed)
    net = fully_connected(settings["widths"]).to(args.device)
    return fit(net, loader(permutation), settings["epochs of real weights"], 1e-3)


def straight_through(seed, clip):
    """Return accuracies on the tasks seen after each task, of deterministic signs."""
    permutations = tasks(seed)
    net = by_sign_(real_net(permutations[0], seed))
    found = []
    for index, permutation in enumerate(permutations):
        how = (settings["epochs"], settings["rate"], settings["decays"])
        fit(net, loader(permutation), *how, clip=clip)
        found.append(accuracies(partial(probabilities, net), permutations[: index + 1]))
    return {"accuracy %": found}


def bernoulli(seed, tau, delta=None):
    """Return accuracies on the tasks seen, and entropies of weights, after each task."""
    permutations, epochs = tasks(seed), settings["epochs"]
    net = real_net(permutations[0], seed)
    prior = tyxe.priors.BinaryPrior(delta, scale="radford")
    likelihood = tyxe.likelihoods.Categorical(len(data("train")[0]))
    bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoBernoulli)
    how = {"num_predictions": settings["draws"], "batch_size": 500}
    found, entropies = [], []
    for index, permutation in enumerate(permutations):
        adam = torch.optim.Adam(bnn.parameters(), lr=settings["rate"])
        schedule = stepwise(adam, epochs, settings["decays"])
        weight = 1.0 if index == 0 and delta is not None else tau
        with tyxe.poutine.local_reparameterization():
            bnn.fit(
                loader(permutation),
                adam,
                epochs,
                lambda *_, s=schedule: s.step(),
                beta=weight,
                progress=False,
            )
        seen = permutations[: index + 1]
        found.append(accuracies(lambda x: bnn.predict(x, **how).softmax(-1), seen))
        entropies.append(weight_entropy(bnn)[1])

        sites = tyxe.util.pyro_sample_sites(bnn.net)
        posteriors = bnn.net_guide.get_detached_distributions(sites)
        bnn.update_prior(tyxe.priors.DictPrior(posteriors))
    return {"accuracy %": found, "weight entropy": entropies}


def earlier():
    """Return cells and commands of earlier runs."""
    content = recorded(path, settings)
    cells = content.get("cells", {})
    return {row: cells.get(row, {}) for row in ROWS}, content.get("commands", [])


def main():
    """Run what is missing, writing the JSON after each cell."""
    cells, commands = earlier()
    args.out.mkdir(parents=True, exist_ok=True)
    about = environment(None, commands)
    for seed in range(args.seeds or settings["seeds"]):
        for row in args.rows:
            if str(seed) in cells[row]:
                continue
            start = time.process_time()
            run = straight_through if "clip" in ROWS[row] else bernoulli
            found = run(seed, **ROWS[row])
            found["CPU seconds"] = round(time.process_time() - start, 1)
            cells[row][str(seed)] = found
            last = found["accuracy %"][-1]
            mean = f"{sum(last) / len(last):.2f}"
            print(f"{row}, seed {seed}: {mean} %, {found['CPU seconds']:.0f} s", flush=True)
            content = {**about, "settings": settings, "rows": ROWS}
            content |= {"published settings": PUBLISHED, "cells": cells}
            path.write_text(json.dumps(content, indent=1) + "\n")


if not (args.table or args.figure):
    main()
elif not path.exists():
    parser.error(f"there is no {path}; run without --table and --figure first")
if not args.table:
    figure(json.loads(path.read_text()), path.with_suffix(".png"))
print(table(json.loads(path.read_text())))
