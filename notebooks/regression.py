# %% [markdown]
# # Regression between two clusters
#
# There are noisy observations of a function in two places, and none in between. What does a model
# say about the gap and the outside? The answer depends on how its posterior is approximated. We
# take one net, one prior and one likelihood, and change only the inference.

# %%
import functools
import os

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
pyro.set_rng_seed(42)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70

x = torch.cat([torch.empty(50, 1).uniform_(-1, -0.7), torch.empty(50, 1).uniform_(0.5, 1)])
y = torch.cos(4 * x + 0.8) + 0.1 * torch.randn_like(x)
grid = torch.linspace(-2, 2, 401)[:, None]
truth = torch.cos(4 * grid + 0.8)

# %% [markdown]
# ## Net, prior, likelihood
#
# The net is plain PyTorch, and is not changed. The prior says which of its parameters are random
# (here all) and how they are distributed before any data. The likelihood says how observations
# scatter about the net's output. Its first argument is the number of training points: mini-batches
# are scaled up to it.

# %%
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1)

# %% [markdown]
# ## Mean field
#
# The guide is the family of distributions that is fitted to the posterior: here independent
# Normals, whose standard deviations start small. `VariationalBNN` puts the four parts together.
#
# `fit` runs inside `local_reparameterization`: it samples the output of a linear layer, separately
# for every data point, instead of its weights. The expected gradient is the same, but it is less
# noisy.

# %%
guide = functools.partial(tyxe.guides.AutoNormal, init_scale=1e-2)
bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
adam = pyro.optim.Adam({"lr": 1e-2})
with tyxe.poutine.local_reparameterization():
    history = bnn.fit([(x, y)], adam, num_epochs=20 if small else 2_000)

print(f"loss {history.loss[0]:.0f} -> {history.loss[-1]:.0f} nats, KL {history.kl[-1]:.0f} nats")

# %% [markdown]
# `evaluate` returns error and log-likelihood; `report` shows what the handler did with each weight.

# %%
with tyxe.poutine.report() as report, tyxe.poutine.local_reparameterization():
    error, log_likelihood = bnn.evaluate(x, y, num_predictions=32, reduction="mean")

print(f"squared error {error:.4f}, log-likelihood {log_likelihood:.3f} nats a point\n")
print(report)

# %% [markdown]
# ## Predict: inside and outside the handler
#
# The handler works in prediction too. Inside it, each point on the grid gets its own noise, so the
# mean and the bands over 32 draws are jagged. Outside, a draw is one set of weights and so one
# smooth function. At any single point both have the same distribution.

# %%
with tyxe.poutine.local_reparameterization():
    inside = bnn.predict(grid, num_predictions=32)
outside = bnn.predict(grid, num_predictions=32)

# %% [markdown]
# ## HMC
#
# This uses another wrapper, and a Pyro kernel instead of the guide; net, prior and likelihood are
# those from above. Trajectories of length 0.3 take some 150 leapfrog steps each, so the chain is
# short to keep this notebook quick: `experiments/two_clusters.py` runs a longer one and records how
# many independent draws it is worth.

# %%
kernel = functools.partial(
    HMC,
    step_size=1e-3,
    trajectory_length=0.3,
    adapt_mass_matrix=False,
    target_accept_prob=0.7,
    init_strategy=functools.partial(init_to_uniform, radius=0.1),
)
sampled = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
draws, warmup = (2, 2) if small else (48, 24)
mcmc = sampled.fit([(x, y)], num_samples=draws, warmup_steps=warmup, disable_progbar=True)
hmc = sampled.predict(grid, num_predictions=min(32, draws))
print({name: tuple(samples.shape) for name, samples in mcmc.get_samples().items()})

# %% [markdown]
# ## Three panels
#
# Bands are one, two and three standard deviations of the prediction, noise included. All three
# follow the data. Mean field stays narrow in the gap between the clusters; HMC is wider there, and
# even wider outside.

# %%
panels = {"mean field, inside": inside, "mean field, outside": outside, "HMC": hmc}
figure, axes = plt.subplots(1, 3, figsize=(10, 3), sharey=True, layout="constrained")
for ax, (title, (mean, scale)) in zip(axes, panels.items(), strict=True):
    tyxe.plotting.predictive_band(grid, mean, scale, ax, train_data=(x, y))
    ax.plot(grid, truth, color="black", linestyle="dashed")
    ax.set(title=title, xlim=(-2, 2), ylim=(-2, 2))
    ax.get_legend().remove()

gap = ((grid > -0.7) & (grid < 0.5)).squeeze(-1)
beyond = (grid.abs() > 1).squeeze(-1)
for title, (_, scale) in panels.items():
    print(f"{title:20} sd in the gap {scale[gap].mean():.3f}, beyond {scale[beyond].mean():.3f}")

# %% [markdown]
# ## Change this line
#
# Each of these replaces the line above that assigns to the same name:
#
# ```python
# # the prior: standard deviations by the layers' fan-in
# prior = tyxe.priors.LayerwiseNormalPrior("radford")
# # the guide: weights that go together
# guide = functools.partial(pyro.infer.autoguide.AutoLowRankMultivariateNormal, rank=10)
# # the likelihood: more noise than there is
# likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.3)
# # the sampler: trajectories that choose their own length
# kernel = functools.partial(pyro.infer.mcmc.NUTS, max_tree_depth=6)
# ```
