# %% [markdown]
# # A graph net
#
# Cora has 2,708 papers, the words in them, and the citations between them. 140 papers have a label
# for training. All papers pass through a net of two graph convolutions, and a mask says which of
# them count. With so few labels, maximum likelihood, MAP and mean field differ in how sure they
# are.

# %%
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch_geometric.nn import GCNConv

import tyxe
from tyxe import metrics

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
steps = 4 if small else 400

names = ["features", "labels", "train_mask", "test_mask", "edge_index"]
local = Path(os.environ.get("TYXE_DATA", "data"), "cora.npz")
if not local.exists():  # the library's own download is a pickle, which may run code
    made = "python experiments/planetoid.py makes it in data/ of the checkout"
    raise SystemExit(f"there is no {local}: {made}; TYXE_DATA names the folder")
nodes = {name: torch.from_numpy(array) for name, array in np.load(local).items()}
features, labels, train, test, edges = (nodes[name] for name in names)
features = features / features.sum(1, keepdim=True).clamp(min=1)  # each word's share of a paper
graph = torch.cat([edges, torch.arange(len(labels)).expand(2, -1)], dim=1)  # and to itself

# %% [markdown]
# ## The net is PyTorch Geometric's
#
# Layers and forward are those of the library.


# %%
class GCN(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        # The plain sum over neighbours; averages would want a prior of larger scale.
        self.first = GCNConv(sizes[0], sizes[1], normalize=False)
        self.second = GCNConv(sizes[1], sizes[2], normalize=False)

    def forward(self, graph, h):
        return self.second(self.first(h, graph).relu(), graph)


net = GCN(features.shape[1], 16, 7)
normal = dist.Normal(0, 1)
prior = tyxe.priors.IIDPrior(normal)
nothing = tyxe.priors.IIDPrior(normal, hide_all=True)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-4, max_guide_scale=0.3)
likelihood = tyxe.likelihoods.Categorical(int(train.sum()))  # nodes with a label, not all nodes

# %% [markdown]
# ## Three posteriors

# %%
bnns = {
    "maximum likelihood": (tyxe.VariationalBNN(net, nothing, likelihood), 0.01),
    "MAP": (tyxe.VariationalBNN(net, prior, likelihood, AutoDelta), 0.01),
    "mean field": (tyxe.VariationalBNN(net, prior, likelihood, guide), 0.1),
}
results = {}
print(f"{'test nodes':22}{'error %':>8}{'NLL':>8}{'ECE %':>8}")
for name, (bnn, rate) in bnns.items():
    adam = torch.optim.Adam(bnn.parameters(), lr=rate)  # an instance, for the schedule
    schedule = torch.optim.lr_scheduler.StepLR(adam, steps // 4, gamma=0.1)
    callback = partial(lambda schedule, *_: schedule.step(), schedule)
    with tyxe.poutine.selective_mask(mask=train, expose=["likelihood.data"]):
        bnn.fit([((graph, features), labels)], adam, steps, callback)
    results[name] = bnn.predict(graph, features, num_predictions=32).softmax(-1)
    found = results[name][test], labels[test]
    error, ece = 100 - 100 * metrics.accuracy(*found), metrics.expected_calibration_error(*found)
    print(f"{name:22}{error:8.1f}{metrics.nll(*found):8.3f}{100 * ece:8.1f}")

# %% [markdown]
# ## Far from the labels
#
# The first panel shows calibration. The others show the mean entropy of predictions, in nats, and
# the share of errors, by the number of citations between a paper and the nearest labelled one.

# %%
hops, reached = torch.full((len(labels),), -1), train.clone()
for distance in range(5):
    hops[reached & (hops < 0)] = distance
    reached = reached.index_fill(0, graph[1, reached[graph[0]]], True)
hops[hops < 0] = 5  # or more, or no way at all

figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
for name, probs in results.items():
    tyxe.plotting.calibration_curve(probs[test], labels[test], axes[0], label=name, num_bins=10)
    entropy, wrong = metrics.predictive_entropy(probs), (probs.argmax(-1) != labels).float()
    at = [k for k in range(1, 6) if (test & (hops == k)).any()]
    for ax, values in ((axes[1], entropy), (axes[2], wrong)):
        ax.plot(at, [values[test & (hops == k)].mean() for k in at], "o-", label=name)
axes[0].get_legend().remove()
_ = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
_ = axes[1].set(xlabel="citations from a label", ylabel="entropy (nats)", ylim=(0, None))
_ = axes[2].set(xlabel="citations from a label", ylabel="share of errors", ylim=(0, None))

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the prior: a narrower one for all three
# normal = dist.Normal(0, 0.3)
# # the guide: radial noise
# guide = partial(tyxe.guides.AutoRadial, init_scale=1e-4)
# # the part that is random: the second convolution alone
# prior = tyxe.priors.IIDPrior(normal, expose=["second.*"])
# ```
