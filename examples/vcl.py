"""Variational continual learning in four lines: the posterior of a task is the prior of the next.

Five tasks, scikit-learn's digits 0 or 1, 2 or 3, ..., 8 or 9, come one after the other, and the
images of earlier ones are gone. The hidden layer is shared and Bayesian; each task has its own
output layer, a head. VCL keeps what earlier tasks need of the hidden layer; the same net by maximum
likelihood forgets.

For your own tasks change `tasks`, the net and its head. If tasks differ in size, set it before each
fit, as below. `tyxe.continual.TaskLoop` is this loop with checkpoints, from which a stopped run
continues.

Needs the extra `examples`: pip install -e ".[examples]". About 10 seconds. Prints accuracies, and
draws results/vcl.png.
"""

import argparse
from functools import partial
from pathlib import Path

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few epochs, in seconds: no result")
epochs = 2 if parser.parse_args().smoke_test else 300
torch.set_num_threads(1)  # such a net is too small to share

pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
pixels = pixels.float() / 16
tasks = {}
for first in range(0, 10, 2):
    of_task = (digits // 2 == first // 2).nonzero().squeeze(1)
    x, y = pixels[of_task], (digits[of_task, None] > first).float()
    tasks[f"{first} or {first + 1}"] = (x[::2], y[::2]), (x[1::2], y[1::2])  # train, test


def learn(prior, guide):
    """Return accuracies on all tasks (columns) after each (rows)."""
    likelihood = tyxe.likelihoods.Bernoulli(1, event_dim=1)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    heads = tyxe.continual.Heads(bnn, modules=["2"])
    accuracy = torch.full((len(tasks), len(tasks)), torch.nan)
    for row, (task, (train, _)) in enumerate(tasks.items()):
        heads.start(task)
        bnn.likelihood.dataset_size = len(train[0])
        bnn.fit([train], partial(torch.optim.Adam, lr=1e-2), epochs, lr_multipliers={"scale": 5})
        if guide is not None:  # the four lines
            sites = tyxe.util.pyro_sample_sites(bnn.net)
            posteriors = bnn.net_guide.get_detached_distributions(sites)
            next_prior = tyxe.priors.DictPrior(posteriors)
            bnn.update_prior(next_prior)
        for column, seen in enumerate(list(tasks)[: row + 1]):
            with heads.use(seen):
                error, _ = bnn.evaluate(*tasks[seen][1], reduction="mean")
            accuracy[row, column] = 1 - error
    return accuracy


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 1))
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
normal = dist.Normal(0, 1)
results = {
    "VCL": learn(tyxe.priors.IIDPrior(normal, hide_modules=["2"]), guide),
    "maximum likelihood": learn(tyxe.priors.IIDPrior(normal, hide_all=True), None),
}
print(f"{'accuracy in % on':24}" + "".join(f"{title:>8}" for title in (*tasks, "mean")))
for name, accuracy in results.items():
    last = 100 * accuracy[-1]
    print(f"{name:24}" + "".join(f"{value:8.1f}" for value in (*last, last.mean())))
ax = tyxe.plotting.accuracy_over_tasks(results)
Path("results").mkdir(exist_ok=True)
ax.figure.savefig("results/vcl.png", dpi=120)
print("wrote results/vcl.png")
