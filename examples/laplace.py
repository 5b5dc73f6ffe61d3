"""A trained net gets a Laplace approximation: error bars without further training.

A small convolutional net is trained on 4,000 images of FashionMNIST in the usual way. Then it gets
a Gaussian about its weights. The precision is the curvature of the loss, in one pass over the data,
plus that of the prior. Predictions are those of the net linearised there.

The prior's precision decides how wide the Gaussian is, and a guess is far off: choose it by
held-out images. If you have none to spare, use the evidence, which here leaves the net too unsure.
For your own net, load its weights instead of training; for a large net, take the last layer alone.
AUROC is for images of digits, not clothes.

Needs the extra `examples`: pip install -e ".[examples]"; and FashionMNIST, which torchvision
downloads unless the folder TYXE_DATA has fashion_mnist.npz. About 30 seconds.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
import torchvision
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe import metrics

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few images, in seconds: no result")
size, epochs = (100, 1) if parser.parse_args().smoke_test else (4_500, 20)
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


(x, y), (x_test, y_test) = images("train"), (part[:2_000] for part in images("test"))
parts = torch.utils.data.random_split(TensorDataset(x, y), [8 / 9, 1 / 9])
loader, held_out = (DataLoader(part, batch_size=100, shuffle=True) for part in parts)
digits = torch.tensor(load_digits().images[:size, None] / 16).float()
unfamiliar = nn.functional.interpolate(digits, size=28)

net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(epochs):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()


@torch.no_grad()
def report(name, predict):
    probs, other = (predict(inputs).softmax(-1) for inputs in (x_test, unfamiliar))
    error, nll = 100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)
    ece = 100 * metrics.expected_calibration_error(probs, y_test)
    auroc = metrics.ood_auroc(probs.amax(-1), other.amax(-1))
    print(f"{name:36}{error:8.1f}{nll:8.3f}{ece:8.1f}{auroc:8.3f}")


print(f"{'test images':36}{'error %':>8}{'NLL':>8}{'ECE %':>8}{'AUROC':>8}")
report("trained", net.eval())
normal = dist.Normal(0, 1)
for which, prior in {
    "all weights": tyxe.priors.IIDPrior(normal, hide_module_types=[nn.BatchNorm2d]),
    "last layer": tyxe.priors.IIDPrior(normal, expose_modules=[net[-1]]),
}.items():
    bnn = tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(len(parts[0])))
    bnn.fit_curvature(loader)
    predict = partial(bnn.predict, batch_size=250)
    report(f"{which}, prior precision 1", predict)
    report(f"{which}, {bnn.optimize_prior_precision():.0f} by evidence", predict)
    best = bnn.optimize_prior_precision(loader=held_out)
    report(f"{which}, {best:.0f} by held-out images", predict)
