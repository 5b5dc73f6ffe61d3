"""A deep ensemble whose members continue as chains: microcanonical Langevin ensembles (MILE).

Scikit-learn's digits, 500 images to train and 1,297 to test, and a net of 2,410 weights. Members
are trained at once in one tensor, each until a held-out part gets worse; then each is the start of
a chain that samples its part of the posterior. The ensemble has the functions at which training
ends, and the chains those around them.

For your own data change the images, net and likelihood; on small nets more members cost little.
4,000 warm-up steps are few: the paper takes 50,000, and docs/mile.md has what they give.

Needs the extra `examples`: pip install -e ".[examples]". About 70 seconds.
"""

import argparse
import functools

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn

import tyxe
from tyxe import metrics
from tyxe.samplers import MCLMC, warm_start

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few steps, in seconds: no result")
smoke_test = parser.parse_args().smoke_test
epochs, warmup, samples = (2, 20, 4) if smoke_test else (500, 4_000, 100)
pyro.set_rng_seed(0)
torch.set_num_threads(1)  # such a net is too small to share

digits = load_digits()
order = torch.randperm(len(digits.target))
images = torch.tensor(digits.data).float()[order] / 16
labels = torch.tensor(digits.target)[order]
train, x_test, y_test = (images[:500], labels[:500]), images[500:], labels[500:]

net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
likelihood = tyxe.likelihoods.Categorical(len(train[0]))
adam = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=1e-3)


def bnn_of(kernel):
    return tyxe.MCMC_BNN(net, prior, likelihood, kernel)


members = bnn_of(MCLMC).starts([train], warm_start(adam, num_epochs=epochs, patience=10), 8)
# One step of next to no length leaves the members where they are.
still = MCLMC(step_size=1e-6, momentum_length=1.0)
print(f"{'':16}{'error %':>8}{'NLL':>8}{'ECE %':>8}")
for name, kernel, steps, kept in [
    ("deep ensemble", still, 0, 1),
    ("MILE", MCLMC, warmup, samples),
]:
    bnn = bnn_of(kernel)
    bnn.fit([train], kept, warmup_steps=steps, thinning=10 if steps else 1, init=members)
    probabilities = bnn.predict(x_test, num_predictions=8 * kept).exp()
    error = 100 * (probabilities.argmax(-1) != y_test).float().mean()
    nll = metrics.nll(probabilities, y_test)
    ece = 100 * metrics.expected_calibration_error(probabilities, y_test)
    print(f"{name:16}{error:8.1f}{nll:8.3f}{ece:8.1f}")
