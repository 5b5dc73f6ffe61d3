"""Only the last layer is Bayesian: a frozen body, and a posterior over the head.

The body is trained on 4,000 images of FashionMNIST, and the head is then fitted to 1,000 that the
body has not seen: on the others its features fit too well, and the head would learn to be too sure.
The head is fitted by maximum likelihood, mean field, and Laplace: another guide or wrapper each.

For your own net replace `body` by the trained part before your last layer, and keep labelled images
for the head. It costs next to nothing, since no gradient passes through the body. So it also works
for nets that are too large for a posterior over all weights.

Needs the extra `examples`: pip install -e ".[examples]"; and FashionMNIST, which torchvision
downloads unless the folder TYXE_DATA has fashion_mnist.npz. About 20 seconds.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few images, in seconds: no result")
size, epochs = (100, 1) if parser.parse_args().smoke_test else (5_000, 20)
torch.manual_seed(0)
torch.set_num_threads(1)  # such a net is too small to share


def images(part):
    local = Path(os.environ.get("TYXE_DATA", "data"), "fashion_mnist.npz")
    if local.exists():
        x, y = (torch.from_numpy(np.load(local)[f"{name}_{part}"]) for name in "xy")
    else:
        found = torchvision.datasets.FashionMNIST("data", part == "train", download=True)
        x, y = found.data, found.targets
    return x[:size, None] / 255, y[:size].long()


(x, y), (x_test, y_test) = images("train"), images("test")
parts = torch.utils.data.random_split(TensorDataset(x, y), [0.8, 0.2])
for_body, for_head = (DataLoader(part, batch_size=100, shuffle=True) for part in parts)

body = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU()),
)
net = nn.Sequential(body, nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(epochs):
    for inputs, labels in for_body:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()

# Frozen, or it is trained along: what a prior hides is not random, but not constant either. In
# eval mode a frozen body keeps the statistics of its BatchNorm.
body.requires_grad_(False).eval()
nothing = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
head = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=[net[-1]])
likelihood = tyxe.likelihoods.Categorical(len(parts[1]))  # the images that the head is fitted to
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)

with torch.no_grad():
    rows = {"trained with the body": net.eval()(x_test)}
plain = tyxe.VariationalBNN(net, nothing, likelihood)
mean_field = tyxe.VariationalBNN(net, head, likelihood, guide)
laplace = tyxe.LaplaceBNN(net, head, likelihood, structure="full")
bnns = {"maximum likelihood": plain, "mean field": mean_field, "Laplace": laplace}
for name, bnn in bnns.items():
    bnn.fit(for_head, partial(torch.optim.Adam, lr=1e-3), 2 * epochs, lr_multipliers={"scale": 10})
    if bnn is laplace:
        bnn.optimize_prior_precision()  # by the evidence
    rows[name] = bnn.predict(x_test, batch_size=500)

print(f"{'the head':28}{'error %':>8}{'NLL':>8}{'ECE %':>8}")
for name, logits in rows.items():
    probs = logits.softmax(-1)
    error, nll = 100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)
    ece = 100 * metrics.expected_calibration_error(probs, y_test)
    print(f"{name:28}{error:8.1f}{nll:8.3f}{ece:8.1f}")
