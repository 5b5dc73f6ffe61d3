"""NUTS over all weights and the noise of a small net, next to the approximations, on real data.

Scikit-learn's diabetes set has ten measurements of a patient, and the disease progression a year
later. There are 200 patients to train and 242 to test, a net of 241 weights, and unknown noise.
Maximum likelihood fits the noise, MAP is a little too sure and mean field a little too unsure. NUTS
samples from the posterior itself; its diagnostics show whether it has converged.

For your own data change `x`, `y` and the net; NUTS is for nets of up to some thousands of weights
and data that fit one batch, as a reference for cheaper methods. Look at r-hat and effective sample
size of predictions, not of weights: nets have many equivalent sets of these.

Needs the extra `examples`: pip install -e ".[examples]". About 60 seconds.
"""

import argparse
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_diabetes
from torch import nn

import tyxe
from tyxe import metrics
from tyxe.guides import AutoNormal
from tyxe.samplers import NUTS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few samples, in seconds: no result")
smoke_test = parser.parse_args().smoke_test
epochs, warmup, samples, depth = (5, 4, 4, 2) if smoke_test else (1_500, 200, 200, 10)
pyro.set_rng_seed(0)
torch.set_num_threads(1)  # such a net is too small to share

bunch = load_diabetes()
order = torch.randperm(len(bunch.target))
x, y = torch.tensor(bunch.data).float()[order], torch.tensor(bunch.target).float()[order, None]
# By the training part's mean and scale: priors of scale one suit data of scale one.
x, y = ((part - part[:200].mean(0)) / part[:200].std(0) for part in (x, y))
x_test, y_test, loader = x[200:], y[200:], [(x[:200], y[:200])]

net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
prior = tyxe.priors.LayerwiseNormalPrior("radford")  # N(0, 1 / fan-in)
nothing = tyxe.priors.LayerwiseNormalPrior("radford", hide_all=True)
likelihood = tyxe.likelihoods.HomoskedasticGaussian(200, scale=dist.LogNormal(0.0, 1.0))


def report(name, bnn, draws):
    mean, scale = bnn.predict(x_test, num_predictions=draws)
    _, log_likelihood = bnn.evaluate(x_test, y_test, num_predictions=draws, reduction="mean")
    covered = 100 * metrics.interval_coverage(mean, scale, y_test, level=0.9)
    rmse = metrics.rmse(mean, y_test)
    print(f"{name:24}{rmse:8.3f}{scale.mean():8.3f}{log_likelihood:16.3f}{covered:16.0f}")


print(f"{'test patients':24}{'rmse':>8}{'sd':>8}{'log-likelihood':>16}{'% within 90 %':>16}")
for name, weights, guide, noise_guide, draws in [
    ("maximum likelihood", nothing, None, AutoDelta, 1),
    ("MAP", prior, AutoDelta, AutoDelta, 1),
    ("mean field", prior, partial(AutoNormal, init_scale=0.05), AutoNormal, 100),
]:
    bnn = tyxe.VariationalBNN(net, weights, likelihood, guide, noise_guide)
    bnn.fit(loader, partial(torch.optim.Adam, lr=1e-2), epochs)
    report(name, bnn, draws)

# Four chains from draws of the prior; deeper trees move farther, and cost twice as much each.
bnn = tyxe.MCMC_BNN(net, prior, likelihood, NUTS(max_tree_depth=depth))
bnn.fit(loader, samples, warmup_steps=warmup)
report("NUTS, four chains", bnn, 4 * samples)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    table = bnn.summary(x_test)
print(
    f"R-hat of outputs at most {table.r_hat.max():.2f} (below 1.01 is fine), effective sample size"
)
print(
    f"of {4 * samples} samples at least {table.ess_bulk.min():.0f}, "
    f"in the median {table.ess_bulk.median():.0f}"
)
