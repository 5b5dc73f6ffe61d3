# %% [markdown]
# # From posterior to decision
#
# Probabilities are for decisions. This notebook decides which images of clothes a classifier
# handles by itself, and which it gives to a person. It also finds sets of classes that hold the
# truth nine times out of ten.

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
from torchvision.datasets import FashionMNIST

import tyxe
from tyxe import calibration

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
size, epochs = (40, 1) if small else (4_000, 20)

local = Path(os.environ.get("TYXE_DATA", "data"), "fashion_mnist.npz")
if local.exists():
    x, y = (torch.from_numpy(np.load(local)[f"{name}_train"]) for name in "xy")
else:
    found = FashionMNIST("data", train=True, download=True)
    x, y = found.data, found.targets
x, y = x[: 2 * size, None] / 255, y[: 2 * size].long()
counts = [size, size // 2, len(x) - size - size // 2]
train, held_out, (x_test, y_test) = zip(x.split(counts), y.split(counts), strict=True)
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)

# %% [markdown]
# ## A posterior
#
# The plain net, and a mean field whose means start at its weights.

# %%
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
)
normal = dist.Normal(0, 1)
prior = tyxe.priors.IIDPrior(normal)
nothing = tyxe.priors.IIDPrior(normal, hide_all=True)
likelihood = tyxe.likelihoods.Categorical(size)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2, max_guide_scale=0.1)
adam = partial(torch.optim.Adam, lr=2e-3)
plain = tyxe.VariationalBNN(net, nothing, likelihood)
plain.fit(loader, adam, epochs)
bnn = tyxe.VariationalBNN(plain.to_module(), prior, likelihood, guide)
with tyxe.poutine.local_reparameterization():
    bnn.fit(loader, adam, epochs // 2 + 1, beta=0.1, lr_multipliers={"scale": 10})

# %% [markdown]
# ## Abstain
#
# Sort images by the probability of their most probable class, and leave the least certain to a
# person. The other images have fewer errors. The curve of risk against coverage shows how many.
#
# How many to leave depends on the costs. An error costs 1, and asking a person costs `price`. The
# expected cost of a decision is one minus the probability of the class, so ask a person if that is
# more than `price`. This is the best rule if the probabilities are right. If they are too high, a
# person is asked too rarely.

# %%
price = 0.2
figure, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
predictions = {}
print(f"{'':12}{'decides %':>10}{'errors %':>10}{'cost':>8}{'cost, none asked':>18}")
for name, model in {"plain net": plain, "mean field": bnn}.items():
    probs = model.predict(x_test, num_predictions=20, batch_size=500).softmax(-1)
    predictions[name] = probs
    tyxe.plotting.risk_coverage(probs, y_test, ax, label=name)
    decides, wrong = 1 - probs.amax(-1) < price, probs.argmax(-1) != y_test
    cost = torch.where(decides, wrong.float(), price).mean()
    row = [100 * decides.float().mean(), 100 * wrong[decides].float().mean(), cost]
    print(f"{name:12}{row[0]:10.1f}{row[1]:10.1f}{row[2]:8.3f}{wrong.float().mean():18.3f}")

# %% [markdown]
# ## Sets that hold the truth
#
# `SplitConformal` needs held-out images. Its sets hold the class with a probability of `level`, for
# any posterior. A better posterior gives smaller sets. Here it is a tie: 1.12 classes by the plain
# net and 1.17 by mean field, which cover 89 % and 90 % of the images. The guarantee is an average
# over held-out sets: with one set of a few thousand images the share may be off by a percent or
# two.

# %%
level = 0.9
conformal = calibration.SplitConformal(level=level)
for name, model in {"plain net": plain, "mean field": bnn}.items():
    wrapped = conformal.wrap(model, [held_out], num_predictions=50)
    sets = wrapped.predict(x_test)
    covered, mean_size = calibration.coverage(sets, y_test), calibration.size(sets)
    print(f"{name:12} sets hold the class of {100 * covered:.1f} %, with {mean_size:.2f} classes")

# %% [markdown]
# ## As they appear
#
# These are images with sets of one class, of two, and so on, by mean field. The true class has a
# star.

# %% tags=["thumbnail"]
classes = FashionMNIST.classes
sizes = sets.sum(-1)
figure, axes = plt.subplots(2, 6, figsize=(11, 5.2), layout="constrained")
chosen = [index for k in (1, 2, 3, 4) for index in (sizes == k).nonzero()[:3, 0].tolist()]
for ax, index in zip(axes.flat, chosen, strict=False):
    ax.imshow(x_test[index, 0].numpy(), cmap="gray_r")
    order = predictions["mean field"][index].argsort(descending=True)
    told = [classes[k] + "*" * int(k == y_test[index]) for k in order if sets[index, k]]
    ax.set_xlabel("\n".join(told))
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the price of a person
# price = 0.05
# # the promise
# level = 0.8
# # the sets: the smallest on average, which may be empty
# conformal = calibration.SplitConformal("lac", level=level)
# # the prior: the last layer alone is random
# prior = tyxe.priors.IIDPrior(normal, expose=["5.*"])
# ```
