"""A trained net becomes Bayesian by variational inference: better probabilities, same net.

A small convolutional net is trained on 4,000 images of FashionMNIST in the usual way. Then its
weights become the means of a posterior with a standard deviation for each weight, and both are
fitted for as long again. If the plain net is trained for as long again instead, its probabilities
get worse.

For your own net load its weights instead of training, and use your loader. The comments say what
matters. Compare with the plain net on held-out data, as the table does.

Needs the extra `examples`: pip install -e ".[examples]"; and FashionMNIST, which torchvision
downloads unless the folder TYXE_DATA has fashion_mnist.npz. About 30 seconds.
"""

import argparse
import copy
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
size, epochs = (100, 1) if parser.parse_args().smoke_test else (4_000, 20)
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


train, (x_test, y_test) = images("train"), images("test")
loader = DataLoader(TensorDataset(*train), batch_size=100, shuffle=True)


def fit_plain(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


net = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
)
fit_plain(net)
longer = copy.deepcopy(net)
fit_plain(longer)

# BatchNorm's scales and shifts stay deterministic: a prior would pull scales from one to zero.
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
guide = partial(
    tyxe.guides.AutoNormal,
    init_scale=1e-2,  # above the default, nearer to where the data leave them
    max_guide_scale=0.1,  # else weights that the data do not hold go to the prior's scale
)
bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(len(train[0])), guide)
with tyxe.poutine.local_reparameterization():
    # Adam moves a log-scale by its rate a step, however steep: at 1e-3 scales would stay behind.
    bnn.fit(loader, partial(torch.optim.Adam, lr=1e-3), epochs, lr_multipliers={"scale": 10})

print(f"{'test images':32}{'error %':>8}{'NLL':>8}{'ECE %':>8}")
with torch.no_grad():
    rows = {"trained": net.eval()(x_test), "trained for as long again": longer.eval()(x_test)}
    rows["mean field"] = bnn.predict(x_test, batch_size=500)
    rows["its mean, a plain net again"] = bnn.to_module()(x_test)
for name, logits in rows.items():
    probs = logits.softmax(-1)
    error, nll = 100 - 100 * metrics.accuracy(probs, y_test), metrics.nll(probs, y_test)
    ece = 100 * metrics.expected_calibration_error(probs, y_test)
    print(f"{name:32}{error:8.1f}{nll:8.3f}{ece:8.1f}")
