# %% [markdown]
# # Continual learning in four lines
#
# Five tasks come one after the other: scikit-learn's digits 0 or 1, 2 or 3, ..., 8 or 9. The images
# of earlier tasks are gone. A net that is trained further forgets them. A Bayesian net makes the
# posterior of a task the prior of the next. That takes four lines, for any posterior.

# %%
import os
from functools import partial

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn

import tyxe

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
epochs = 2 if small else 300

pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
pixels, tasks = pixels.float() / 16, {}
for first in range(0, 10, 2):
    of_task = (digits // 2 == first // 2).nonzero().squeeze(1)
    x, y = pixels[of_task], (digits[of_task, None] > first).float()
    tasks[f"{first} or {first + 1}"] = (x[::2], y[::2]), (x[1::2], y[1::2])  # train, test

# %% [markdown]
# ## The four lines
#
# The hidden layer is shared and random. Each task has its own output layer, a head, which the prior
# leaves out.


# %%
def carry_over(bnn):
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    posteriors = bnn.net_guide.get_detached_distributions(sites)
    prior = tyxe.priors.DictPrior(posteriors)
    bnn.update_prior(prior)


def options(bnn):
    return {"lr_multipliers": {"scale": 5}} if isinstance(bnn, tyxe.VariationalBNN) else {}


def learn(bnn, update):
    """Return accuracies on all tasks (columns) after each (rows)."""
    heads = tyxe.continual.Heads(bnn, modules=["2"])
    accuracy = torch.full((len(tasks), len(tasks)), torch.nan)
    for row, (task, (train, _)) in enumerate(tasks.items()):
        heads.start(task)
        bnn.likelihood.dataset_size = len(train[0])
        bnn.fit([train], partial(torch.optim.Adam, lr=1e-2), epochs, **options(bnn))
        if update:
            carry_over(bnn)
        for column, seen in enumerate(list(tasks)[: row + 1]):
            with heads.use(seen):
                error, _ = bnn.evaluate(*tasks[seen][1], num_predictions=32, reduction="mean")
            accuracy[row, column] = 1 - error
    return accuracy


# %% [markdown]
# ## Three learners, one loop
#
# Maximum likelihood keeps training the same weights. Variational continual learning (VCL) carries a
# mean field from task to task. Online Laplace carries a Normal about the weights, from the
# curvature of the loss.

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 1))
normal = dist.Normal(0, 1)
body = tyxe.priors.IIDPrior(normal, hide_modules=["2"])
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
likelihood = tyxe.likelihoods.Bernoulli(1, event_dim=1)
structure = "kron"

nothing = tyxe.priors.IIDPrior(normal, hide_all=True)
learners = {
    "maximum likelihood": (tyxe.VariationalBNN(net, nothing, likelihood), False),
    "VCL": (tyxe.VariationalBNN(net, body, likelihood, guide), True),
    "online Laplace": (tyxe.LaplaceBNN(net, body, likelihood, structure=structure), True),
}
results = {name: learn(*how) for name, how in learners.items()}

# %%
print(f"{'accuracy in % on':22}" + "".join(f"{title:>8}" for title in (*tasks, "mean")))
for name, accuracy in results.items():
    last = 100 * accuracy[-1]
    print(f"{name:22}" + "".join(f"{value:8.1f}" for value in (*last, last.mean())))

# %% [markdown]
# ## Accuracies, as they fall or hold
#
# Read a column from top to bottom to see how the accuracy on a task changes while others are
# learned.

# %% tags=["thumbnail"]
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for ax, (name, accuracy) in zip(axes, results.items(), strict=True):
    ax.imshow(accuracy.numpy(), vmin=0.5, vmax=1, cmap="viridis")
    for row, column in (~accuracy.isnan()).nonzero().tolist():
        value = accuracy[row, column].item()
        color = "white" if value < 0.85 else "black"
        ax.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=color)
    ax.set(title=name, xlabel="tested on", xticks=range(5), xticklabels=tasks)
    ax.set(yticks=range(5), yticklabels=tasks, ylabel="after" if ax is axes[0] else "")

# %%
ax = tyxe.plotting.accuracy_over_tasks(results)

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the curvature: a number for each weight
# structure = "diag"
# # the guide: larger standard deviations at the start
# guide = partial(tyxe.guides.AutoNormal, init_scale=0.1)
# # the prior of the first task
# normal = dist.Normal(0, 0.3)
# ```
