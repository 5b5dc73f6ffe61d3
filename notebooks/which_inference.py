# %% [markdown]
# # Which inference?
#
# This notebook has one net, one prior, one likelihood, forty points, and eighteen ways to the
# posterior, with the seconds that each took on one core. There are some exceptions. MC dropout has
# its own net, with 200 hidden units instead of ten, and like ML and the ensemble it has no prior.
# Variational Laplace, like the Laplace approximations, predicts by the net linearised about its
# means. SWAG, whose width comes from the noise of batches, has batches of ten. Four chains of
# Hamiltonian Monte Carlo are the reference: black lines show their band of two standard deviations
# in all panels.

# %%
import os
import time
from functools import partial

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from torch import nn

import tyxe

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.cat([torch.rand(20, 1) - 2, torch.rand(20, 1) + 0.5])
y = torch.sin(2 * x) + 0.3 * x + 0.2 * torch.randn_like(x)
grid = torch.linspace(-3, 3, 121)[:, None]

net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
nothing = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.2)
adam = partial(torch.optim.Adam, lr=1e-2)
loader, epochs = [(x, y)], 8 if small else 1_200

# %% [markdown]
# ## Eighteen lines
#
# The methods differ by a guide, a kernel, a wrapper or a handler, here as a decorator. Each
# function returns a fitted BNN.

# %%
normal = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
low_rank = partial(autoguide.AutoLowRankMultivariateNormal, rank=10, init_scale=1e-2)
full = partial(autoguide.AutoMultivariateNormal, init_scale=1e-2)
inducing = partial(tyxe.guides.AutoInducing, inducing_rows=4, inducing_cols=4, everywhere=True)
ivon = partial(tyxe.optim.IVON, lr=0.1, betas=(0.9, 0.995), hess_init=100.0)
sghmc = partial(tyxe.samplers.SGHMC, lr=1e-3, schedule="cyclical", num_cycles=4)


def fitted(bnn, *arguments, data=loader, **options):
    bnn.fit(data, *arguments, **options)
    return bnn


def variational(guide, optim=adam, prior=prior):
    return fitted(tyxe.VariationalBNN(net, prior, likelihood, guide), optim, epochs)


def sampled(kernel, draws, warmup=None, **options):
    draws, warmup = (4, warmup and 10) if small else (draws, warmup)
    bnn = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
    return fitted(bnn, draws, warmup_steps=warmup, **options)


def member(index):
    return tyxe.VariationalBNN(tyxe.util.reset_parameters_(net), nothing, likelihood)


dropout = nn.Sequential(nn.Linear(1, 200), nn.Tanh(), nn.Dropout(0.1), nn.Linear(200, 1))
parts, sgd = (net, prior, likelihood), partial(torch.optim.SGD, lr=8e-3)
hmc = partial(tyxe.samplers.HMC, num_steps=100)
tens = torch.utils.data.DataLoader([*zip(x, y, strict=True)], batch_size=10, shuffle=True)
methods = {
    "HMC": lambda: sampled(hmc, 300, 300),
    "ML": lambda: variational(None, prior=nothing),
    "MAP": lambda: variational(autoguide.AutoDelta),
    "MC dropout": lambda: fitted(tyxe.DropoutBNN(dropout, likelihood), adam, epochs),
    "ensemble of 10": lambda: fitted(tyxe.EnsembleBNN(member, 10), adam, epochs, vectorize=True),
    "mean field": lambda: variational(normal),
    "local reparam.": lambda: tyxe.poutine.local_reparameterization()(variational)(normal),
    "flipout": lambda: tyxe.poutine.flipout()(variational)(normal),
    "variational Laplace": lambda: tyxe.poutine.variational_laplace()(variational)(normal),
    "IVON": lambda: variational(normal, ivon),
    "inducing weights": lambda: variational(inducing),
    "low rank": lambda: variational(low_rank),
    "full covariance": lambda: variational(full),
    "Laplace, Kronecker": lambda: fitted(tyxe.LaplaceBNN(*parts), adam, epochs),
    "Laplace, full": lambda: fitted(tyxe.LaplaceBNN(*parts, structure="full"), adam, epochs),
    "SWAG": lambda: fitted(tyxe.SWAG_BNN(*parts, 2 if small else 20), sgd, epochs, data=tens),
    "SGHMC": lambda: sampled(sghmc, 100, thinning=5),
    "MCLMC": lambda: sampled(tyxe.samplers.MCLMC, 100, 1_000, num_chains=10, thinning=10),
}
found = {}
for name, method in methods.items():
    torch.manual_seed(0)
    start = time.process_time()
    bnn = method()
    seconds = time.process_time() - start
    how = {"predictive": "glm"} if name == "variational Laplace" else {}
    found[name] = *bnn.predict(grid, num_predictions=4 if small else 100, **how), seconds
    if name == "HMC":
        print(f"R-hat at most {tyxe.diagnostics.reference(bnn, grid, largest_r_hat=9).r_hat:.3f}")

# %% [markdown]
# ## Eighteen bands
#
# Bands of one and two standard deviations, noise included. A band that is narrower than the lines,
# between or beyond the data, is too sure there. Variational Laplace has not converged in this
# number of steps.

# %%
_, axes = plt.subplots(6, 3, figsize=(9, 12), dpi=70, sharex=True, sharey=True, layout="tight")
centre, width, _ = found["HMC"]
for ax, (name, (mean, scale, seconds)) in zip(axes.flat, found.items(), strict=True):
    tyxe.plotting.predictive_band(grid, mean, scale, ax, num_scales=2, train_data=(x, y))
    ax.plot(grid, centre - 2 * width, "k", grid, centre + 2 * width, "k", linewidth=0.8)
    ax.set(title=f"{name}: {seconds:.1f} s", xlabel="", ylabel="", ylim=(-4, 4))
    ax.get_legend().remove()

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the prior: standard deviations by the layers' fan-in
# prior = tyxe.priors.LayerwiseNormalPrior("radford")
# # the guide of five of the panels: larger standard deviations at the start
# normal = partial(tyxe.guides.AutoNormal, init_scale=0.1)
# # the reference: another sampler
# hmc = partial(tyxe.samplers.NUTS, max_tree_depth=7)
# ```
#
# [Which method](../which_method.md) measures which of them to take for your problem.
