"""Online Laplace on permuted MNIST [T 3.3.5.1]: the posterior is the next prior.

Each task is MNIST under another order of its pixels, the first its own, learned one after the other
by a net of 784-100-100-10 ReLU units, all of whose weights have a N(0, 1) prior before the first
task. The precision after a task is `lambda` times its curvature, plus the precision before.

`kron`: one Kronecker product for each layer, of factors averaged over the tasks; `kron sum`: a
product for each task; `diag`: the diagonal; `EWC`: the diagonal, with a penalty about each task's
own weights; `approximate`: the curvature of all tasks seen, taken anew at the newest weights.

Each run is a method, lambda and a seed. Runs that the JSON in --out has with the same settings are
left out, and an unfinished one goes on after its last finished task. Accuracies are those of the
fitted weights.
"""

import argparse
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import _continual as tools
import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from _data import images
from torch import nn

import tyxe
from tyxe.plotting import accuracy_over_tasks

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
LAPLACE = {
    "kron": {"structure": "kron", "accumulate": "average"},
    "diag": {"structure": "diag"},
    "EWC": {"structure": "diag", "accumulate": "modes"},
    "kron sum": {"structure": "kron", "accumulate": "sum"},
    "approximate": {"structure": "kron"},
}
first = [*LAPLACE][:3]
parser.add_argument("--methods", nargs="+", choices=LAPLACE, default=first, help="default: 3 first")
parser.add_argument("--lambdas", nargs="+", type=float, default=[1.0, 3.0, 10.0], help="1 3 10")
parser.add_argument("--decay", type=float, default=0.0, help="rate of task t / (1 + decay (t - 1))")
parser.add_argument("--tasks", type=int, default=10, help="default: 10; [T] has 50")
parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
parser.add_argument("--published", action="store_true", help="all images and 20 epochs a task")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--smoke-test", action="store_true", help="few images, one epoch: no result")
args = parser.parse_args()
settings = {"batch": 250, "rate": 1e-2, "images": 10_000, "test images": 2_000, "epochs": 10}
if args.published:
    settings |= {"images": 50_000, "test images": None, "epochs": 20}
if args.smoke_test:
    args.lambdas = args.lambdas[:1]
    settings |= {"images": 60, "test images": 20, "epochs": 1}
torch.set_num_threads(1)
tasks = [str(number) for number in range(1, args.tasks + 1)]


def run(method, multiplier, seed, checkpoint):
    """Learn all tasks; return the accuracies."""
    generator = torch.Generator().manual_seed(seed)
    orders = {task: torch.randperm(784, generator=generator) for task in tasks}
    orders["1"] = torch.arange(784)
    sets = [images("mnist", part) for part in ("train", "test")]
    counts = settings["images"], settings["test images"]
    train, test = ((x[:n].flatten(1), y[:n]) for (x, y), n in zip(sets, counts, strict=True))

    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    options = {"curvature": "fisher", "multiplier": multiplier, **LAPLACE[method]}
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, **options)

    def batches(task):
        return tools.Shuffled(train[0][:, orders[task]], train[1], settings["batch"])

    def fit(task):
        rate = settings["rate"] / (1 + args.decay * tasks.index(task))
        optim = torch.optim.Adam(bnn.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.StepLR(optim, -(-settings["epochs"] // 3), 0.1)
        lower = {"callback": lambda *_: schedule.step(), "progress": False}
        bnn.fit(batches(task), optim, settings["epochs"], **lower)

    def update(task):
        if method == "approximate":
            seen = tasks[: tasks.index(task) + 1]
            bnn.update_prior(prior)
            bnn.likelihood.dataset_size = len(seen) * len(train[0])
            bnn.fit_curvature((batch for one in seen for batch in batches(one)), progress=False)
            bnn.likelihood.dataset_size = len(train[0])
        sites = tyxe.util.pyro_sample_sites(bnn.net)
        posteriors = bnn.net_guide.get_detached_distributions(sites)
        bnn.update_prior(tyxe.priors.DictPrior(posteriors))

    def evaluate(task):
        at_mode = {"predictive": "bnn", "num_predictions": 0, "reduction": "mean"}
        error, _ = bnn.evaluate(test[0][:, orders[task]], test[1], **at_mode)
        return 1 - error.item()

    loop = tyxe.continual.TaskLoop(bnn, tasks, fit, evaluate, update)
    loop.run(checkpoint, callback=tools.say(f"{method}, lambda {multiplier:g}, seed {seed}"))
    return {"accuracy": [row[: t + 1] for t, row in enumerate(loop.accuracy.tolist())]}


def curves(runs):
    """Draw the mean accuracy over the tasks seen."""
    figure, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    accuracy_over_tasks({name: tools.matrices(group) for name, group in runs.items()}, ax)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def table(runs):
    """Return a Markdown table of accuracies after the last task, in percent."""
    lines = [
        "| method | runs | mean | lowest | first task | newest | CPU minutes |",
        "|---" * 7 + "|",
    ]
    for name, group in runs.items():
        last = tools.matrices(group)[:, -1]
        columns = [last.mean(-1), last.amin(-1), last[:, 0], last[:, -1]]
        minutes = sum(run["cpu seconds"] for run in group.values()) / len(group) / 60
        cells = [str(len(group)), *map(tools.with_error, columns), f"{minutes:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


size = "_published" if args.published else ""
results = tools.Results(args.out, f"online_laplace_{args.tasks}{size}", settings)
if not args.table:
    for seed in args.seeds:
        for method in args.methods:
            for multiplier in args.lambdas:
                group = f"{method}, lambda {multiplier:g}"
                group += f", decay {args.decay:g}" if args.decay else ""
                results.fill(group, seed, partial(run, method, multiplier, seed))
    results.draw(curves)
print(table(results.content["runs"]))
