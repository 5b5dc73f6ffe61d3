# %% [markdown]
# # A trained classifier becomes Bayesian
#
# A small convolutional net is trained on 4,000 images of FashionMNIST in the usual way. It makes
# few errors, but is too sure of them. Six methods start from this one net; none trains it from
# scratch. All are compared on the same test images, and on images that are not clothes at all
# (MNIST).

# %%
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from torch import nn
from torchvision.datasets import MNIST, FashionMNIST

import tyxe
from tyxe import metrics

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70


def images(source, part, rows):
    file = {MNIST: "mnist.npz", FashionMNIST: "fashion_mnist.npz"}[source]
    local = Path(os.environ.get("TYXE_DATA", "data"), file)
    if local.exists():
        x, y = (torch.from_numpy(np.load(local)[f"{name}_{part}"]) for name in "xy")
    else:
        found = source("data", part == "train", download=True)
        x, y = found.data, found.targets
    return x[rows, None] / 255, y[rows].long()


size, epochs = 80 if small else 4_000, 20
train = images(FashionMNIST, "train", slice(size))
held_out = images(FashionMNIST, "train", slice(size, size + size // 8))
x_test, y_test = images(FashionMNIST, "test", slice(size // 2))
unknown, _ = images(MNIST, "test", slice(size // 4))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), 100, shuffle=True)

# %% [markdown]
# ## The trained net
#
# It is trained by maximum likelihood: the prior hides all parameters, and there is no guide. A net
# from your own training loop works too.

# %%
net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
)
normal = dist.Normal(0, 1)
adam = partial(torch.optim.Adam, lr=1e-3)
likelihood = tyxe.likelihoods.Categorical(size)
plain = tyxe.VariationalBNN(net, tyxe.priors.IIDPrior(normal, hide_all=True), likelihood)
plain.fit(loader, adam, epochs)
net = plain.to_module()

# %% [markdown]
# ## Six methods
#
# The parts are the same for all. BatchNorm's scales and shifts stay deterministic, since a prior
# about zero would pull scales down from one. For a posterior over the last layer alone, only the
# prior differs. The guide's means start at the net's weights, and a cap limits the standard
# deviations that the data do not determine. `beta` gives the KL a tenth of its weight: a cold
# posterior.

# %%
prior = tyxe.priors.IIDPrior(normal, hide_module_types=[nn.BatchNorm2d])
head = tyxe.priors.IIDPrior(normal, expose_modules=[net[-1]])
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2, max_guide_scale=0.1)


def laplace(prior):
    bnn = tyxe.LaplaceBNN(net, prior, likelihood)
    bnn.fit_curvature(loader)
    bnn.optimize_prior_precision(loader=[held_out])
    return bnn


def swag():
    bnn = tyxe.SWAG_BNN(net, prior, likelihood, rank=2 if small else 10)
    bnn.fit(loader, partial(torch.optim.SGD, lr=0.1, momentum=0.9), 12, start=0, beta=0.1)
    return bnn


def mean_field(**options):
    bnn = tyxe.VariationalBNN(net, prior, likelihood, partial(guide, **options))
    with tyxe.poutine.local_reparameterization():
        bnn.fit(loader, adam, epochs // 2 + 1, beta=0.1, lr_multipliers={"scale": 10})
    return bnn


methods = {
    "trained net": lambda: plain,
    "temperature": lambda: tyxe.calibration.TemperatureScaling().wrap(plain, [held_out]),
    "last layer, Laplace": lambda: laplace(head),
    "all layers, Laplace": lambda: laplace(prior),
    "SWAG": swag,
    "mean field, sd only": lambda: mean_field(train_loc=False),
    "mean field": mean_field,
}

# %% [markdown]
# ## What they predict
#
# NLL in nats an image; ECE is the distance between confidence and accuracy; the AUROC says how well
# the maximal probability tells clothes from digits.
#
# Left: below the diagonal a net is too confident. Right: the entropy on test images (solid) and on
# digits (dashed). The further the dashed line of a method is from its solid one, the better it
# recognises digits.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
print(f"{'':22}{'error %':>8}{'NLL':>8}{'ECE %':>8}{'AUROC':>8}")
for color, (name, method) in zip(plt.cm.tab10.colors, methods.items(), strict=False):
    predict = partial(method().predict, num_predictions=20, batch_size=500)
    probs, far = (predict(x).softmax(-1) for x in (x_test, unknown))
    error, nll = 100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)
    ece = 100 * metrics.expected_calibration_error(probs, y_test)
    auroc = metrics.ood_auroc(probs.amax(-1), far.amax(-1))
    print(f"{name:22}{error:8.1f}{nll:8.3f}{ece:8.1f}{auroc:8.3f}")
    tyxe.plotting.calibration_curve(probs, y_test, left, label=name, color=color, min_count=10)
    tyxe.plotting.entropy_ecdf(metrics.predictive_entropy(probs), right, color=color)
    tyxe.plotting.entropy_ecdf(metrics.predictive_entropy(far), right, color=color, linestyle="--")

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the prior: wider weights
# normal = dist.Normal(0, 3)
# # the guide: no cap
# guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
# # the part that is random: convolutions alone
# head = tyxe.priors.IIDPrior(normal, expose_module_types=[nn.Conv2d])
# ```
#
# Use your own net as `net`, with its loader. If it is already trained, skip the loop above.
