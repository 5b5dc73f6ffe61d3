"""A graph net by maximum likelihood, MAP and mean field, in PyTorch Geometric or in DGL.

Cora has 2,708 papers, their words and citations; 140 have a label for training. The layers are
    those of the library. All nodes pass through the net, and a mask says which of them count.

For your own graph change the data and the layers: the net's inputs are a tuple of its forward's
arguments, and the likelihood's size is the number of nodes with a label, not of all nodes.

Needs PyTorch Geometric, pip install -e ".[pyg]", or DGL, ".[dgl]" (docs/graphs.md says how it loads
on a newer torch); and Cora, as cora.npz in the folder TYXE_DATA, or in data/, where
experiments/planetoid.py puts it. About 20 seconds.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tyxe import metrics

try:
    dgl = None
    from torch_geometric.nn import GCNConv
except ModuleNotFoundError:
    import dgl
    from dgl.nn import GraphConv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few steps, in seconds: no result")
steps = 4 if parser.parse_args().smoke_test else 400
torch.set_num_threads(1)  # such a net is too small to share

local = Path(os.environ.get("TYXE_DATA", "data"), "cora.npz")
if not local.exists():  # the libraries' own downloads are pickles, which may run code
    sys.exit(f"there is no {local}: python experiments/planetoid.py makes data/cora.npz")
nodes = {name: torch.from_numpy(array) for name, array in np.load(local).items()}
names = ["features", "labels", "train_mask", "test_mask", "edge_index"]
features, labels, train, test, edges = (nodes[name] for name in names)
features = features / features.sum(1, keepdim=True).clamp(min=1)  # each word's share of a paper
edges = torch.cat([edges, torch.arange(len(labels)).expand(2, -1)], dim=1)  # and to itself
graph = edges if dgl is None else dgl.graph((edges[0], edges[1]))


class GCN(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        layer = GCNConv if dgl is None else GraphConv
        # The plain sum over neighbours; averages would want a prior of larger scale.
        plain = {"normalize": False} if dgl is None else {"norm": "none"}
        self.first, self.second = layer(*sizes[:2], **plain), layer(*sizes[1:], **plain)

    def forward(self, graph, h):
        if dgl is None:
            return self.second(self.first(h, graph).relu(), graph)
        return self.second(graph, self.first(graph, h).relu())


torch.manual_seed(0)
net = GCN(features.shape[1], 16, 7)
normal = dist.Normal(0, 1)
prior, nothing = tyxe.priors.IIDPrior(normal), tyxe.priors.IIDPrior(normal, hide_all=True)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-4, max_guide_scale=0.3)
likelihood = tyxe.likelihoods.Categorical(int(train.sum()))
rows = {
    "maximum likelihood": (tyxe.VariationalBNN(net, nothing, likelihood), 0.01),
    "MAP": (tyxe.VariationalBNN(net, prior, likelihood, AutoDelta), 0.01),
    "mean field": (tyxe.VariationalBNN(net, prior, likelihood, guide), 0.1),
}
print(f"{'test nodes':24}{'error %':>8}{'NLL':>8}{'ECE %':>8}")
for name, (bnn, rate) in rows.items():
    adam = torch.optim.Adam(bnn.parameters(), lr=rate)  # an instance, for the schedule
    schedule = torch.optim.lr_scheduler.StepLR(adam, steps // 4, gamma=0.1)
    callback = partial(lambda schedule, *_: schedule.step(), schedule)
    with tyxe.poutine.selective_mask(mask=train, expose=["likelihood.data"]):
        bnn.fit([((graph, features), labels)], adam, steps, callback)
    probs = bnn.predict(graph, features).softmax(-1)[test]
    error, nll = 100 - 100 * metrics.accuracy(probs, labels[test]), metrics.nll(probs, labels[test])
    ece = 100 * metrics.expected_calibration_error(probs, labels[test])
    print(f"{name:24}{error:8.1f}{nll:8.3f}{ece:8.1f}")
