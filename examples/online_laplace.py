"""Online Laplace: a net learns tasks one after the other, and its curvature keeps the earlier ones.

There are five tasks, scikit-learn's digits with five orders of the pixels, and one net for all. The
Laplace approximation after a task becomes the prior of the next, by the four lines of vcl.py:
weights are held in the directions that mattered. Without these lines the net forgets; a diagonal
holds each weight separately, and keeps less than Kronecker factors.

For your own tasks change `tasks` and the net. `curvature_weight` above 1 holds earlier tasks more
firmly than Bayes' rule, and new ones learn less: choose it by held-out data of all tasks; of 1, 3
and 10 the last is best here.

Needs the extra `examples`: pip install -e ".[examples]". About 20 seconds. Prints accuracies, and
draws results/online_laplace.png.
"""

import argparse
from functools import partial
from pathlib import Path

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few epochs, in seconds: no result")
count, epochs = (2, 1) if parser.parse_args().smoke_test else (5, 40)
torch.manual_seed(0)
torch.set_num_threads(1)  # such a net is too small to share

pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
order = torch.randperm(len(digits))
x, y = pixels[order].float() / 16, digits[order]
tasks = [torch.randperm(64) for _ in range(count)]  # orders of the pixels
net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))


def learn(structure, keep=True, **options):
    torch.manual_seed(0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    likelihood = tyxe.likelihoods.Categorical(1_000)
    how = tyxe.LaplaceOptions(**options)
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure=structure, options=how)
    accuracy = torch.full((count, count), torch.nan)
    for row, task in enumerate(tasks):
        train = TensorDataset(x[:1_000, task], y[:1_000])
        loader = DataLoader(train, batch_size=100, shuffle=True)
        bnn.fit(loader, partial(torch.optim.Adam, lr=3e-3), epochs)
        if keep:
            sites = tyxe.util.pyro_sample_sites(bnn.net)
            posteriors = bnn.net_guide.get_detached_distributions(sites)
            next_prior = tyxe.priors.DictPrior(posteriors)
            bnn.update_prior(next_prior)
        for column, seen in enumerate(tasks[: row + 1]):
            test = x[1_000:, seen], y[1_000:]
            # At the weights themselves: a prediction by the linearised net takes longer.
            error, _ = bnn.evaluate(*test, num_predictions=0, reduction="mean")
            accuracy[row, column] = 1 - error
    return accuracy


results = {
    "Kronecker factors": learn("kron", accumulate="average", curvature_weight=10.0),
    "diagonal": learn("diag", curvature_weight=10.0),
    "prior N(0, 1) each time": learn("diag", keep=False),
}
titles = [*range(1, count + 1), "mean"]
print(f"{'accuracy in % on task':28}" + "".join(f"{title:>7}" for title in titles))
for name, accuracy in results.items():
    last = 100 * accuracy[-1]
    print(f"{name:28}" + "".join(f"{value:7.1f}" for value in (*last, last.mean())))
ax = tyxe.plotting.accuracy_over_tasks(results)
Path("results").mkdir(exist_ok=True)
ax.figure.savefig("results/online_laplace.png", dpi=120)
print("wrote results/online_laplace.png")
