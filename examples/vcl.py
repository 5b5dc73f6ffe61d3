"""Variational continual learning of split-MNIST [T fig. 5.4]: the posterior is the next prior.

Five tasks, 0 or 1, 2 or 3, .., 8 or 9, one after the other, by a net of 784-200-1 ReLU units. Its
hidden layer is shared and has a N(0, 1) prior before the first task; the output layer is a head of
each task's own, outside the prior, and starts at the same values for each. VCL makes the posterior
the prior of the next task, ML goes on training the same weights without one.

Variants with a coreset keep some images of each task from its training, and fit to those of the
task in question before predicting it, from the posterior and for that prediction alone. With fast
scales these have five times the rate of the means: as far in a fifth of the updates.

Each run is a method, a number of epochs a task and a seed. Runs that the JSON in --out holds with
the same settings are left out, and an unfinished one goes on after its last finished task. The
table gives means over runs, with two standard errors. The JSON has for each task how far the
posterior has moved, too; `head refitted` is the accuracy of new output layers on the hidden units
as they are in the end.
"""

import argparse
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import _continual as tools
import pyro.distributions as dist
import torch
from torch import nn

import tyxe

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
methods = ["VCL", "ML", "VCL fast scales", "VCL random", "VCL k-center"]
parser.add_argument(
    "--methods", nargs="+", choices=methods, default=methods[:2], help="default: VCL ML"
)
parser.add_argument("--epochs", type=int, default=120, help="a task (default: 120; [T] has 600)")
parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--figure", action="store_true", help="only draw the figure of what --out has")
parser.add_argument(
    "--out", type=Path, default=Path("results"), help="folder of figure and JSON (default: results)"
)
parser.add_argument("--smoke-test", action="store_true", help="2 epochs of few images: no result")
args = parser.parse_args()
settings = {"hidden units": 200, "batch": 250, "rate": 1e-3, "first scale": 1e-4, "draws": 8}
settings |= {"coreset": 40, "coreset epochs": 120, "images": None}
if args.smoke_test:
    args.epochs, args.seeds = 2, args.seeds[:1]
    settings |= {"hidden units": 8, "coreset": 6, "coreset epochs": 2, "images": 40}
torch.set_num_threads(1)
tasks = ["0/1", "2/3", "4/5", "6/7", "8/9"]


def run(method, epochs, seed, checkpoint):
    """Learn the five tasks; return the accuracies and what else was looked at."""
    train, test = tools.split_mnist(settings["images"])
    coresets = {}
    if method.removeprefix("VCL ") in tyxe.continual.CORESETS:
        pick = partial(
            tyxe.continual.coreset_indices,
            size=settings["coreset"],
            method=method.removeprefix("VCL "),
        )
        for task, data in train.items():
            torch.manual_seed(seed)
            coresets[task], train[task] = tyxe.continual.split_coreset(data, pick(data[0]))

    torch.manual_seed(seed)
    width = settings["hidden units"]
    net = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 1))
    likelihood = tyxe.likelihoods.Bernoulli(len(train[tasks[0]][0]), event_dim=1)
    if method == "ML":
        prior, guide = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True), None
    else:
        prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=["2"])
        start = tyxe.guides.PretrainedInitializer.from_net(net)
        guide = partial(
            tyxe.guides.AutoNormal, init_loc_fn=start, init_scale=settings["first scale"]
        )
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    multipliers = {"scale": 5} if method == "VCL fast scales" else None
    heads = tyxe.continual.Heads(bnn, modules=["2"])
    moves = tools.Moves(bnn)

    def fit(task, data=train, num_epochs=epochs):
        x, y = data[task]
        bnn.likelihood.dataset_size = len(x)
        optim = partial(torch.optim.Adam, lr=settings["rate"])
        with tyxe.poutine.local_reparameterization():
            batches = tools.Shuffled(x, y, settings["batch"])
            bnn.fit(batches, optim, num_epochs, lr_multipliers=multipliers, progress=False)

    def update(task):
        moves.look(task, updates=epochs * -(-len(train[task][0]) // settings["batch"]))
        sites = tyxe.util.pyro_sample_sites(bnn.net)
        if sites:
            posteriors = bnn.net_guide.get_detached_distributions(sites)
            bnn.update_prior(tyxe.priors.DictPrior(posteriors))

    def evaluate(task):
        if not coresets:
            return tools.accuracy(bnn, *test[task], settings["draws"])
        with tyxe.continual.restored(bnn, heads):
            fit(task, coresets, settings["coreset epochs"])
            return tools.accuracy(bnn, *test[task], settings["draws"])

    parts = {"moves": moves}
    loop = tyxe.continual.TaskLoop(bnn, tasks, fit, evaluate, update, heads=heads, parts=parts)
    loop.run(checkpoint, callback=tools.say(f"{method}, {epochs} epochs, seed {seed}"))
    refitted = {task: tools.refitted(bnn, train[task], test[task]) for task in tasks}
    accuracy = [row[: t + 1] for t, row in enumerate(loop.accuracy.tolist())]
    return {"accuracy": accuracy, "moves": moves.rows, "head refitted": refitted}


results = tools.Results(args.out, "split_mnist", settings | {"tasks": tasks})
if not (args.table or args.figure):
    for seed in args.seeds:
        for method in args.methods:
            group = f"{method}, {args.epochs} epochs"
            results.fill(group, seed, partial(run, method, args.epochs, seed))
if not args.table:
    results.draw(tools.curves)
print(tools.table(results.content["runs"]))
