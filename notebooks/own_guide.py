# %% [markdown]
# # Writing a guide
#
# A guide defines the approximate posterior: a distribution for each site, that is, for each random
# parameter. A mean field has a standard deviation for every weight. This guide has one for each
# unit, shared by all weights into it, so it needs little more than half the numbers.

# %%
import math
import os
from functools import partial

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import tyxe
from tyxe import metrics, testing

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
epochs = 3 if small else 1_500

# %% [markdown]
# ## The class
#
# Subclass `Guide`, set parameters up in the constructor, and return a distribution from
# `site_distribution`. The base class provides everything else: the Pyro program, draws, the KL,
# `state_dict`, predictions.


# %%
class AutoUnitwiseNormal(tyxe.guides.Guide):
    """Independent Normals whose scale is shared by all weights into a unit."""

    def __init__(self, module, init_loc_fn=tyxe.guides.init_to_net, init_scale=0.05):
        super().__init__(module)  # the program that samples the sites; the BNN passes it
        starts = {site.own_name: init_loc_fn(self.messages[site.name]) for site in self.sites}
        self.locs = tyxe.util.SiteTensors(starts)
        # (out, 1) for a weight (out, in), in the dtype of the site: new_full, not torch.full.
        scales = {
            name: loc.new_full((len(loc), *(1,) * (loc.dim() - 1)), math.log(init_scale))
            for name, loc in starts.items()
        }
        self.log_scales = tyxe.util.SiteTensors(scales)

    def site_distribution(self, site):
        loc, scale = self.locs[site.own_name], self.log_scales[site.own_name].exp()
        return dist.Normal(loc, scale.expand_as(loc)).to_event(loc.dim())


# %% [markdown]
# ## What the library relies on
#
# The contract suite checks sites, shapes, dtypes, gradients through draws, copies and files.

# %%
testing.check_guide(AutoUnitwiseNormal)
print("AutoUnitwiseNormal passes")

# %% [markdown]
# ## Compared with a mean field
#
# The data are scikit-learn's diabetes set: 200 patients to fit, 242 to test.

# %%
bunch = load_diabetes()
torch.manual_seed(0)
order = torch.randperm(len(bunch.target))
x, y = torch.tensor(bunch.data).float()[order], torch.tensor(bunch.target).float()[order, None]
x, y = ((part - part[:200].mean(0)) / part[:200].std(0) for part in (x, y))
x_test, y_test, loader = x[200:], y[200:], [(x[:200], y[:200])]

net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
prior = tyxe.priors.LayerwiseNormalPrior("radford")
likelihood = tyxe.likelihoods.HomoskedasticGaussian(200, scale=0.7)
guides = tyxe.guides.AutoNormal, AutoUnitwiseNormal
scales = {}
print(f"{'test patients':22}{'numbers':>10}{'KL':>8}{'rmse':>8}{'log-likelihood':>16}")
for guide in guides:
    bnn = tyxe.VariationalBNN(net, prior, likelihood, partial(guide, init_scale=0.05))
    with tyxe.poutine.local_reparameterization(), tyxe.poutine.report() as report:
        history = bnn.fit(loader, partial(torch.optim.Adam, lr=1e-2), epochs)
    rmse = metrics.rmse(bnn.predict(x_test, num_predictions=100)[0], y_test)
    _, log_likelihood = bnn.evaluate(x_test, y_test, num_predictions=100, reduction="mean")
    count = sum(parameter.numel() for parameter in bnn.net_guide.parameters())
    print(f"{guide.__name__:22}{count:10}{history.kl[-1]:8.1f}{rmse:8.3f}{log_likelihood:16.3f}")
    scales[guide.__name__] = bnn.net_guide.get_detached_distributions()["0.weight"].stddev

# %% [markdown]
# Local reparameterisation treats the new guide too, because it returns Normals; and its KL has a
# closed form. `report` shows this for each site:

# %%
print(report)

# %% [markdown]
# ## The first layer's standard deviations
#
# A row is a hidden unit, a column one of the ten measurements of a patient. Most units stay at the
# prior's standard deviation. If the data narrow a unit, the mean field narrows it for all
# measurements alike, so one number for the unit is enough.

# %%
figure, axes = plt.subplots(1, len(guides), figsize=(8, 5), sharey=True, layout="constrained")
for ax, (name, scale) in zip(axes, scales.items(), strict=True):
    shown = ax.imshow(
        scale.numpy(), vmin=0, vmax=scales["AutoNormal"].max(), cmap="viridis", aspect="auto"
    )
    ax.set(title=name, xticks=range(10), yticks=range(0, 20, 5), xlabel="measurement")
    ax.set_xticklabels(bunch.feature_names)
axes[0].set_ylabel("hidden unit")
_ = figure.colorbar(shown, ax=axes, label="standard deviation")

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the guides that are compared
# guides = tyxe.guides.AutoNormal, tyxe.guides.AutoRadial, AutoUnitwiseNormal
# # the prior
# prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
# # the likelihood: noise that is fitted
# likelihood = tyxe.likelihoods.HomoskedasticGaussian(200, scale=nn.Parameter(torch.tensor(0.7)))
# ```
#
# For an idea of your own change the last line of the class: another distribution, such as
# `dist.Laplace`, and run `check_guide` again.
