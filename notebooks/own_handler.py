# %% [markdown]
# # Writing a handler
#
# A handler changes how linear maps with random weights are computed, without changes to net, prior,
# likelihood or guide. This one answers a question: which layer does the uncertainty come from? It
# runs every layer except one at the posterior's mean.

# %%
import os
from contextlib import nullcontext
from functools import partial

import matplotlib.pyplot as plt
import pyro.distributions as dist
import torch
from sklearn.datasets import make_moons
from torch import nn

import tyxe
from tyxe import metrics
from tyxe.poutine import Draw, LinearMapMessenger

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
epochs, draws = (5, 4) if small else (1_500, 50)

# %% [markdown]
# ## The handler
#
# Subclass `LinearMapMessenger` and implement `answer`: return the map's output, or None to leave it
# to the next handler, or to the plain draw.


# %%
class RandomOnlyIn(LinearMapMessenger):
    """Run all linear maps at the posterior's mean, but for that of one layer."""

    name, treatment = "RandomOnlyIn", "mean"

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def answer(self, event):
        # `event.draws` are those of weight and bias that are random; names are "net.0.weight".
        if any(draw.name_of_site.startswith(f"net.{self.layer}.") for draw in event.draws):
            return None
        parts = (event.weight, event.bias)
        means = (part.center() if isinstance(part, Draw) else part for part in parts)
        return event.function(event.input, *means)


# %% [markdown]
# ## A net
#
# Three layers on two half moons, fitted by mean field.

# %%
points, labels = make_moons(200, noise=0.15, random_state=0)
x, y = torch.tensor(points).float(), torch.tensor(labels)
net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
guide = partial(tyxe.guides.AutoNormal, init_scale=0.05)
bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(len(x)), guide)
with tyxe.poutine.local_reparameterization():
    history = bnn.fit([(x, y)], partial(torch.optim.Adam, lr=1e-2), epochs, beta=0.1)

# %% [markdown]
# ## The question
#
# The mutual information of label and weights measures how much draws of the weights disagree. It is
# the entropy of the mean prediction minus the mean entropy of the draws' predictions.

# %%
side = torch.linspace(-3, 3, 60)
grid = torch.cartesian_prod(side + 0.5, side + 0.25)


def disagreement(inputs):
    probs = bnn.predict(inputs, num_predictions=draws, aggregate=False).softmax(-1)
    each = [metrics.predictive_entropy(draw) for draw in probs]
    return metrics.predictive_entropy(probs.mean(0)) - torch.stack(each).mean(0)


handlers = {"all layers": nullcontext()}
handlers |= {f"layer {i} only": RandomOnlyIn(i) for i in (0, 2, 4)}
print(f"{'mutual information':22}{'at the data':>12}{'on the grid':>12}")
maps = {}
for name, handler in handlers.items():
    with handler:
        at_data, maps[name] = disagreement(x), disagreement(grid)
    print(f"{name:22}{at_data.mean():12.3f}{maps[name].mean():12.3f}")

# %% [markdown]
# `report` shows the handler's own name for its treatment:

# %%
with tyxe.poutine.report() as report, RandomOnlyIn(4):
    _ = bnn.predict(x)
print(report)

# %% [markdown]
# ## Where, by layer
#
# Draws disagree most in the bright areas. On the line both classes are equally probable at the
# means.

# %%
highest = max(map_.max() for map_ in maps.values())
apart = bnn.predict(grid, num_predictions=0).diff(dim=-1).reshape(60, 60).T
figure, axes = plt.subplots(1, 4, figsize=(12, 3.3), sharey=True, layout="constrained")
for ax, (name, map_) in zip(axes, maps.items(), strict=True):
    box = [-2.5, 3.5, -2.75, 3.25]
    how = {"extent": box, "origin": "lower", "vmin": 0, "vmax": highest, "cmap": "magma"}
    shown = ax.imshow(map_.reshape(60, 60).T.numpy(), **how)
    ax.contour(side + 0.5, side + 0.25, apart, levels=[0], colors="white", linewidths=0.8)
    for label, color in enumerate(("#56B4E9", "#E69F00")):
        ax.plot(*x[y == label].T, ".", color=color, markersize=3)
    ax.set_title(name)
_ = figure.colorbar(shown, ax=axes, label="nats")

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the prior: standard deviations by the layers' fan-in
# prior = tyxe.priors.LayerwiseNormalPrior("radford")
# # the guide: a cap on standard deviations
# guide = partial(tyxe.guides.AutoNormal, init_scale=0.05, max_guide_scale=0.1)
# ```
#
# For your own idea, change `answer`. A handler that should not change the distribution of outputs
# has to pass `tyxe.testing.check_handler`. This one does not, since it removes noise.
