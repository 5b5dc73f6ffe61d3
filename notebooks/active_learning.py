# %% [markdown]
# # Which images to label next
#
# Labels cost money, images do not. A net starts from 50 labels of FashionMNIST and asks for 50 more
# in each of five rounds. It asks for random images, or for those about which its posterior is most
# unsure.

# %%
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import FashionMNIST

import tyxe
from tyxe.predictive import scores

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
size, batch, rounds, epochs, seeds = (40, 4, 2, 1, 2) if small else (1_000, 50, 5, 40, 3)


def images(part):
    local = Path(os.environ.get("TYXE_DATA", "data"), "fashion_mnist.npz")
    if local.exists():
        x, y = (torch.from_numpy(np.load(local)[f"{name}_{part}"]) for name in "xy")
    else:
        found = FashionMNIST("data", part == "train", download=True)
        x, y = found.data, found.targets
    return x[:size, None] / 255, y[:size].long()


(pool, labels), test = images("train"), images("test")

# %% [markdown]
# ## The net
#
# Its dropout stays on in predictions, so draws differ. Every other wrapper has the same scores.

# %%
dropout = 0.5


def fit(chosen):
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(dropout), nn.Linear(32 * 7 * 7, 64), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(64, 10)),
    )
    bnn = tyxe.DropoutBNN(net, tyxe.likelihoods.Categorical(len(chosen)))
    loader = DataLoader(TensorDataset(pool[chosen], labels[chosen]), batch_size=50, shuffle=True)
    bnn.fit(loader, partial(torch.optim.Adam, lr=2e-3), epochs)
    return bnn


def error_of(bnn):
    return 100 * bnn.evaluate([test], num_predictions=10, reduction="mean")[0].item()


# %% [markdown]
# ## Five rounds
#
# BALD is the mutual information between label and weights. The entropy is also high for images that
# are ambiguous under all weights. The variance is that of the draws' probabilities. A batch is
# drawn in proportion to a power of the score, since the images with the highest scores are alike.

# %%
names = ("random", "bald", "predictive_entropy", "expected_variance")
choose = partial(scores.batch, size=batch, power=4)


def next_batch(bnn, name, chosen):
    score = torch.ones(size)
    if name != "random":
        score = bnn.ood_score(pool, name, num_predictions=10)
    known = torch.zeros(size).index_fill(0, chosen, 1.0).bool()
    return choose(score.masked_fill(known, 0.0))


errors = {name: [] for name in names}
for seed in range(seeds):
    torch.manual_seed(seed)
    start = torch.randperm(size)[:batch]
    first = fit(start)
    for name, curves in errors.items():
        torch.manual_seed(seed)
        bnn, chosen, curve = first, start, [error_of(first)]
        for _ in range(rounds):
            chosen = torch.cat([chosen, next_batch(bnn, name, chosen)])
            bnn = fit(chosen)
            curve.append(error_of(bnn))
        curves.append(curve)

# %%
counts = [batch * (done + 1) for done in range(rounds + 1)]
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
print(f"{'test error %, labels':22}" + "".join(f"{count:>12}" for count in counts))
for name, curves in errors.items():
    mean, sd = torch.tensor(curves).mean(0), torch.tensor(curves).std(0) / len(curves) ** 0.5
    print(f"{name:22}" + "".join(f"{m:7.1f} ±{s:4.1f}" for m, s in zip(mean, sd, strict=True)))
    ax.plot(counts, mean, label=name)
    ax.fill_between(counts, mean - sd, mean + sd, alpha=0.2)
ax.set(xlabel="labels", ylabel="test error, %")
_ = ax.legend()

# %% [markdown]
# Bands are standard errors over three seeds. They overlap nearly everywhere: the scores save few
# labels here, since classes are of equal size and the last rounds have labelled much of the pool.
# Always compare with random images before you rely on a score.

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the images of highest score, however alike they are
# choose = lambda score: score.topk(batch).indices
# # another score
# names = ("random", "max_probability")
# # less dropout, and so draws that differ less
# dropout = 0.2
# ```
