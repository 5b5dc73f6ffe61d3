"""Active learning: which images to label next, by the uncertainty of a posterior.

A small convolutional net with dropout starts from 50 labels of FashionMNIST, and asks for 50 more
in each of five rounds: at random, or by a score of its draws. BALD, the mutual information between
label and weights, is high where the draws disagree; the entropy is also high where a label would be
noise; the variance is that of the draws' probabilities. Points with high scores are alike, so a
batch is drawn in proportion to a power of them. Test errors are means of three seeds.

For your own data replace `images` and the net, keep the loop, and always compare with random
points: they are hard to beat while labels are few.

Needs the extra `examples`: pip install -e ".[examples]"; and FashionMNIST, which torchvision
downloads unless the folder TYXE_DATA has fashion_mnist.npz. About 100 seconds. Draws
results/active_learning.png.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe.predictive import scores

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few images, in seconds: no result")
small = parser.parse_args().smoke_test
size, batch, rounds, epochs, seeds = (40, 4, 2, 1, 2) if small else (1_000, 50, 5, 40, 3)
torch.set_num_threads(1)  # such a net is too small to share


def images(part):
    local = Path(os.environ.get("TYXE_DATA", "data"), "fashion_mnist.npz")
    if local.exists():
        x, y = (torch.from_numpy(np.load(local)[f"{name}_{part}"]) for name in "xy")
    else:
        found = torchvision.datasets.FashionMNIST("data", part == "train", download=True)
        x, y = found.data, found.targets
    return x[:size, None] / 255, y[:size].long()


(pool, labels), test = images("train"), images("test")


def fit(chosen):
    """Train a new net on the labels so far; its dropout stays on in predictions."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32 * 7 * 7, 64), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(64, 10)),
    )
    bnn = tyxe.DropoutBNN(net, tyxe.likelihoods.Categorical(len(chosen)))
    loader = DataLoader(TensorDataset(pool[chosen], labels[chosen]), batch_size=50, shuffle=True)
    bnn.fit(loader, partial(torch.optim.Adam, lr=2e-3), epochs)
    return bnn


def error_of(bnn):
    return 100 * bnn.evaluate([test], num_predictions=10, reduction="mean")[0].item()


errors = {n: [] for n in ("random", "bald", "predictive_entropy", "expected_variance")}
for seed in range(seeds):
    torch.manual_seed(seed)
    start = torch.randperm(size)[:batch]
    first = fit(start)
    for name, curves in errors.items():
        bnn, chosen, curve = first, start, [error_of(first)]
        for _ in range(rounds):
            score = torch.ones(size)
            if name != "random":
                score = bnn.ood_score(pool, name, num_predictions=10)
            known = torch.zeros(size).index_fill(0, chosen, 1.0).bool()
            chosen = torch.cat(
                [chosen, scores.batch(score.masked_fill(known, 0.0), batch, power=4)]
            )
            bnn = fit(chosen)
            curve.append(error_of(bnn))
        curves.append(curve)

counts = [batch * (done + 1) for done in range(rounds + 1)]
print(f"{'test error %, labels':22}" + "".join(f"{count:>12}" for count in counts))
for name, curves in errors.items():
    mean, sd = torch.tensor(curves).mean(0), torch.tensor(curves).std(0) / len(curves) ** 0.5
    print(f"{name:22}" + "".join(f"{m:7.1f} ±{s:4.1f}" for m, s in zip(mean, sd, strict=True)))
    plt.plot(counts, mean, label=name)
    plt.fill_between(counts, mean - sd, mean + sd, alpha=0.2)
plt.legend()
plt.gca().set(xlabel="labels", ylabel="test error, %")
Path("results").mkdir(exist_ok=True)
plt.savefig("results/active_learning.png")
print("wrote results/active_learning.png")
