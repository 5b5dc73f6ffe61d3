# %% [markdown]
# # Out-of-distribution images
#
# A classifier of clothes (FashionMNIST) sees digits (MNIST). It has to name a piece of clothing,
# but it should not be sure. A plain net is compared with an ensemble, and with a Laplace
# approximation of the plain net's last layer.

# %%
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST, FashionMNIST

import tyxe
from tyxe import metrics

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
size, epochs = (40, 1) if small else (4_000, 20)


def images(source, part):
    file = {MNIST: "mnist.npz", FashionMNIST: "fashion_mnist.npz"}[source]
    local = Path(os.environ.get("TYXE_DATA", "data"), file)
    if local.exists():
        x, y = (torch.from_numpy(np.load(local)[f"{name}_{part}"]) for name in "xy")
    else:
        found = source("data", part == "train", download=True)
        x, y = found.data, found.targets
    return x[:size, None] / 255, y[:size].long()


train, (x_test, y_test) = images(FashionMNIST, "train"), images(FashionMNIST, "test")
unknown, _ = images(MNIST, "test")
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)

# %% [markdown]
# ## Three models
#
# The ensemble's members are nets of maximum likelihood from different starts. The first member is
# also the plain net, and the Laplace approximation is made about its weights.

# %%
normal = dist.Normal(0, 1)
nothing = tyxe.priors.IIDPrior(normal, hide_all=True)
likelihood = tyxe.likelihoods.Categorical(size)


def member(index):
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )
    return tyxe.VariationalBNN(net, nothing, likelihood)


ensemble = tyxe.EnsembleBNN(member, 5)
ensemble.fit(loader, partial(torch.optim.Adam, lr=2e-3), epochs)
plain = ensemble.members[0]
head = tyxe.priors.IIDPrior(normal, expose=["5.*"])
laplace = tyxe.LaplaceBNN(plain.to_module(), head, likelihood)
laplace.fit_curvature(loader)
_ = laplace.optimize_prior_precision()  # by the evidence

# %%
models = {"plain net": plain, "last layer, Laplace": laplace, "ensemble of 5": ensemble}
results = {}
print(f"{'':22}{'error %':>8}{'NLL':>8}{'AUROC':>8}{'FPR at 95 %':>13}")
for name, model in models.items():
    probs, other = (model.predict(x, batch_size=500).softmax(-1) for x in (x_test, unknown))
    results[name] = probs, other
    scores = -metrics.predictive_entropy(probs), -metrics.predictive_entropy(other)
    row = [100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)]
    row += [metrics.ood_auroc(*scores), 100 * metrics.fpr_at_tpr(*scores)]
    print(f"{name:22}{row[0]:8.1f}{row[1]:8.3f}{row[2]:8.3f}{row[3]:13.1f}")

# %% [markdown]
# The last column is the percentage of digits that pass a threshold that 95 % of the clothes pass.
#
# ## Entropies

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3), sharey=True, layout="constrained")
for ax, (name, pair) in zip(axes, results.items(), strict=True):
    scores = (-metrics.predictive_entropy(probs) for probs in pair)
    tyxe.plotting.ood_histogram(*scores, ax, score="negative entropy (nats)")
    ax.set_title(name)

# %% [markdown]
# ## Eight digits
#
# These are the first digits of the test set, not selected. Under each digit are the plain net's
# class and its probability, and below that those of the Laplace approximation.

# %%
classes = FashionMNIST.classes
figure, axes = plt.subplots(1, 8, figsize=(11, 2.3), layout="constrained")
for index, ax in enumerate(axes):
    ax.imshow(unknown[index, 0].numpy(), cmap="gray_r")
    told = [results[name][1][index].max(0) for name in ("plain net", "last layer, Laplace")]
    ax.set_xlabel("\n".join(f"{classes[k]} {100 * p:.0f} %" for p, k in told))
    ax.set(xticks=[], yticks=[])

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the structure: a number for each weight
# laplace = tyxe.LaplaceBNN(plain.to_module(), head, likelihood, structure="diag")
# # the part that is random: all layers
# head = tyxe.priors.IIDPrior(normal)
# # more members
# ensemble = tyxe.EnsembleBNN(member, 10)
# ```
