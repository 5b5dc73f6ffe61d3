"""Tasks one after the other: online Laplace, synaptic intelligence, and their bounds [T 3.3.5].

`--data disjoint`: MNIST's digits 0 to 4, then 5 to 9, with one output layer of ten classes, over
the strength of what holds the weights [T fig. 3.13], and the accuracy where only the task's own
classes are in question. `--data vision`: MNIST, notMNIST, FashionMNIST and CIFAR-10, with a
convolutional net and an output layer for each task. `--data permuted`: synaptic intelligence and
bounds on the tasks of online_laplace.py, by Adam at a constant 1e-3 (there 1e-2, falling twice).

Methods: Laplace with Kronecker factors (kron) or a diagonal (diag), whose precision is the sum over
tasks; penalties about each task's own weights (per-task kron, EWC); synaptic intelligence (SI); and
as bounds, plain training on (ML), training on all tasks seen (joint, where tasks share the output
layer) and a net for each task alone. Strengths multiply the curvature, or are SI's c on the mean
loss. Laplace, ML and the bounds take Nesterov's gradient descent (except on `permuted`) with a rate
that falls twice by a factor of 10; tasks after the first start lower the stronger they are held.
SI takes Adam.

A run is a method, a strength and a seed; those that the JSON in --out holds with the same settings
are left out. Against the paper's settings (`--published`) the default has fewer images, epochs and
tasks; SVHN is left out, since too few of its images are at hand.
"""

import argparse
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import _continual as tools
import _task_sequences as sequences
import pyro.distributions as dist
import torch

import tyxe
from tyxe.continual import Heads, SynapticIntelligence, TaskLoop

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", choices=sequences.SETTINGS, default="disjoint", help="default: disjoint"
)
parser.add_argument(
    "--methods", nargs="+", choices=sequences.METHODS, help="default: all that the tasks allow"
)
parser.add_argument("--strengths", nargs="+", type=float, help="default: by method")
parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
parser.add_argument("--published", action="store_true", help="the paper's settings, see above")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--figure", action="store_true", help="only draw the figure of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--smoke-test", action="store_true", help="few images, one epoch: no result")
args = parser.parse_args()
torch.set_num_threads(1)
settings = sequences.settings(args.data, args.published, args.smoke_test)
without = [m for m in args.methods or () if m not in settings["strengths"]]
if without and not args.strengths:
    parser.error(
        f"--data {args.data} has no strengths for {', '.join(without)}: give --strengths, or "
        f"--methods among {', '.join(settings['strengths'])}"
    )


def run(method, strength, seed, checkpoint):
    """Learn all tasks; return the accuracies, or say that the fit diverged."""
    tasks, net, head = sequences.build(args.data, settings, seed)
    names = list(tasks)
    laplace = sequences.LAPLACE.get(method)
    prior = partial(tyxe.priors.IIDPrior, dist.Normal(0, settings["prior scale"]))
    likelihood = tyxe.likelihoods.Categorical(1)
    if laplace:
        hidden = prior(hide_modules=head)
        bnn = tyxe.LaplaceBNN(net, hidden, likelihood, multiplier=strength, **laplace)
    else:
        bnn = tyxe.VariationalBNN(net, prior(hide_all=True), likelihood)
    heads = Heads(bnn, head) if head else None
    intelligence = SynapticIntelligence(bnn, strength, heads=heads) if method == "SI" else None
    fresh = {name: value.clone() for name, value in bnn.net.state_dict().items()}

    def fit(task):
        number = names.index(task)
        if method == "alone":
            bnn.net.load_state_dict(fresh)
        x, y = sequences.together(tasks, names[: number + 1] if method == "joint" else [task])
        bnn.likelihood.dataset_size = len(x)
        batches = tools.Shuffled(x, y, settings["batch"])
        adam = torch.optim.Adam(bnn.parameters(), lr=1e-3)
        if intelligence is not None:
            bnn.fit(batches, intelligence.watch(adam), settings["SI epochs"], progress=False)
        elif args.data == "permuted":
            bnn.fit(batches, adam, settings["epochs"], progress=False)
        else:
            unit = sequences.SLOWER[args.data].get(method, 1)
            slower = max(1, number * (strength or 0) / unit)
            descent = torch.optim.SGD(
                bnn.parameters(), settings.get("rate", 0.1) / slower, momentum=0.9, nesterov=True
            )
            schedule = torch.optim.lr_scheduler.StepLR(descent, -(-settings["epochs"] // 3), 0.1)

            def lower(*_):
                schedule.step()

            bnn.fit(batches, descent, settings["epochs"], callback=lower, progress=False)

    def update(task):
        if intelligence is not None:
            intelligence.update()
        elif laplace:
            sites = tyxe.util.pyro_sample_sites(bnn.net)
            posteriors = bnn.net_guide.get_detached_distributions(sites)
            bnn.update_prior(tyxe.priors.DictPrior(posteriors))

    def evaluate(task):
        error, _ = bnn.evaluate(
            *tasks[task][1], num_predictions=0, predictive="bnn", reduction="mean", batch_size=1_000
        )
        return 1 - error.item()

    parts = {} if intelligence is None else {"intelligence": intelligence}
    loop = TaskLoop(bnn, names, fit, evaluate, update, heads=heads, parts=parts)
    try:
        loop.run(checkpoint, callback=tools.say(sequences.label(method, strength, seed)))
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return {"tasks": names, "diverged": names[loop.done]}
    found = {"tasks": names, "accuracy": sequences.rows(loop.accuracy, method == "alone")}
    if args.data == "disjoint":
        found["own classes"] = sequences.among_own_classes(bnn.to_module(), tasks)
    return found


results = tools.Results(args.out, f"continual_{args.data}", settings)
if not (args.table or args.figure):
    chosen = args.methods or [m for m in sequences.METHODS if m in settings["strengths"]]
    for seed in args.seeds:
        for method in chosen:
            for strength in args.strengths or settings["strengths"][method]:
                group = sequences.label(method, strength)
                results.fill(group, seed, partial(run, method, strength, seed))
if not args.table:
    results.draw(partial(sequences.figure, args.data))
print(sequences.table(results.content["runs"]))
