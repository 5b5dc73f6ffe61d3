"""Regression on noisy observations in two places, with error bars between and beyond them.

Four parts make a Bayesian net: the net, a prior over its weights, a likelihood that says how
targets scatter about outputs, and a way to the posterior. The last part is first a guide, one
Normal for each weight (mean field), and then a Gaussian over all weights together (Laplace). Mean
field is too sure where there are no data, and more training does not change that: for a net as
small as this take Laplace, or NUTS as in nuts.py.

For your own problem change the net, and `x` and `y` (standardise both). If the noise is not known,
give the likelihood a distribution for it, as nuts.py does.

Needs the extra `examples`: pip install -e ".[examples]". About 10 seconds. Prints scores on new
data, and draws results/regression.png.
"""

import argparse
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from torch import nn

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few epochs, in seconds: no result")
epochs = 20 if parser.parse_args().smoke_test else 2_000
torch.manual_seed(0)


def observe(low, high, count):
    x = torch.empty(count, 1).uniform_(low, high)
    return x, torch.cos(4 * x + 0.8) + 0.1 * torch.randn_like(x)


pairs = zip(observe(-1.0, -0.7, 50), observe(0.5, 1.0, 50), strict=True)
x, y = (torch.cat(pair) for pair in pairs)
loader = [(x, y)]  # or a DataLoader

net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
# The number of training points, whatever the batches are.
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1)
adam = partial(torch.optim.Adam, lr=1e-2)

guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
mean_field = tyxe.VariationalBNN(net, prior, likelihood, guide)
with tyxe.poutine.local_reparameterization():  # the same objective, with less noisy gradients
    history = mean_field.fit(loader, adam, epochs)
print(f"mean field: loss from {history.loss[0]:.0f} to {history.loss[-1]:.0f} nats")

laplace = tyxe.LaplaceBNN(net, prior, likelihood, structure="full")
laplace.fit(loader, adam, epochs)

grid = torch.linspace(-2, 2, 401)[:, None]
truth = torch.cos(4 * grid + 0.8)
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
print(f"{'new data in':28}{'rmse':>8}{'mean sd':>10}{'log-likelihood':>16}")
for ax, name, bnn in zip(axes, ("mean field", "Laplace"), (mean_field, laplace), strict=True):
    for low, high in [(-1.0, -0.7), (-0.7, 0.5), (0.5, 1.0), (1.0, 2.0)]:
        new_x, new_y = observe(low, high, 500)
        mean, scale = bnn.predict(new_x, num_predictions=64)  # the noise is in the scale
        rmse, sd = tyxe.metrics.rmse(mean, new_y), scale.mean()
        _, log_likelihood = bnn.evaluate(new_x, new_y, num_predictions=64, reduction="mean")
        print(f"{f'{name}, {low} to {high}':28}{rmse:8.2f}{sd:10.2f}{log_likelihood:16.2f}")
    mean, scale = bnn.predict(grid, num_predictions=64)
    tyxe.plotting.predictive_band(grid, mean, scale, ax, train_data=(x, y), true_function=truth)
    ax.set(title=name, ylim=(-3, 3))
Path("results").mkdir(exist_ok=True)
figure.savefig("results/regression.png", dpi=120)
print("wrote results/regression.png")
