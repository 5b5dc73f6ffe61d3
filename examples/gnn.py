"""A graph convolutional net on Cora, by ML, MAP, mean field and Laplace [T 5.3.1, tab. 5.2].

Two layers, 1433-16-7 with a ReLU between; each is a linear map after the plain sum over neighbours
and the node itself. 140 labelled nodes of Planetoid's split for training, 500 for validation and
1,000 for testing; rows of the features sum to one; all nodes make a batch, and a mask leaves those
without a label out of the loss. As in the paper, ML and MAP take 200 steps of Adam at 1e-2; mean
field takes 400 at 0.1, divided by 10 after 100, 200 and 300, with standard deviations from 1e-4 up
to 0.3, means from the net's own values and 8 draws to predict; the prior is N(0, 1); five seeds. Of
all times that the net is looked at, the one with the lowest NLL on validation nodes counts: NLL is
that, the other columns are those of test nodes then (ECE with 10 bins). ML and MAP are looked at
after each step, mean field after each fourth, or with --published after each.

Beyond the paper: mean field sampled in other ways, and by mini-batches of neighbour-sampled nodes;
Laplace about the net after the last step of MAP, of the last layer by the full GGN and of all
weights by Kronecker factors, with the prior precision of the highest evidence or ("tuned") of the
lowest validation NLL. The JSON in --out is written after every cell, and a run with the same
settings leaves out the cells that it holds.
"""

import argparse
import json
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path

import _extras  # noqa: F401
import pyro.distributions as dist
import torch
from _gnn import run_missing, scores, table
from _graphs import BACKENDS, NeighborLoader, backend, cora
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tyxe.guides import AutoNormal, PretrainedInitializer
from tyxe.poutine import flipout, local_reparameterization, selective_mask

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--backend", choices=BACKENDS, default="torch", help="default: torch")
parser.add_argument("--methods", nargs="+", metavar="NAME", help="rows (default: all of them)")
parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
parser.add_argument("--published", action="store_true", help="look after each step, see above")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the JSON file")
parser.add_argument("--smoke-test", action="store_true", help="few steps, one seed: no result")
args = parser.parse_args()
often = 1 if args.published else 4
settings = {
    "hidden units": 16,
    "point": {"steps": 200, "rate": 1e-2, "cut every": 200, "draws": 0, "look every": 1},
    "mean field": {"steps": 400, "rate": 0.1, "cut every": 100, "draws": 8, "look every": often},
    "mini-batch": 35,
    "neighbours": [10, 10],
    "Laplace samples": 1_000,
    "tuned precisions": {"full": [0.1, 0.3, 1.0, 3.0, 10.0], "kron": [10.0, 30.0, 100.0, 300.0]},
}
if args.smoke_test:
    args.seeds = 1
    for kind in ("point", "mean field"):
        settings[kind] |= {"steps": 4, "cut every": 4, "look every": 2}
    settings |= {"Laplace samples": 100, "tuned precisions": {"full": [1.0], "kron": [10.0]}}
torch.set_num_threads(1)


class GCN(nn.Module):
    """Two layers, on a graph or on a tuple of two blocks: the first layer's and the second's."""

    def __init__(self, inputs, hidden, outputs, sum_neighbours):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.sum_neighbours = sum_neighbours

    def forward(self, graph, features):
        below, above = graph if isinstance(graph, tuple) else (graph, graph)
        hidden = self.first(self.sum_neighbours(below, features)).relu()
        return self.second(self.sum_neighbours(above, hidden))


@cache
def problem():
    """Return the data, their graph, how to make others, and how to sum over neighbours."""
    data, (graph_of, sum_neighbours) = cora(reduced=args.smoke_test), backend(args.backend)
    return data, graph_of(data.edges), graph_of, sum_neighbours


def batches(mask, size, counts=(-1, -1), shuffle=False):
    """Return a loader of the nodes of a mask."""
    data, _, graph_of, _ = problem()
    return NeighborLoader(data, counts, data.masks[mask], graph_of, size, shuffle)


def likelihood():
    """Return the likelihood: its size is the number of labelled nodes."""
    return tyxe.likelihoods.Categorical(int(problem()[0].masks["train"].sum()))


def fit(seed, kind, prior, guide=None, handler=nullcontext, is_sampled=False):
    """Fit a net, looking at it after each epoch; return the best row, and the net at the end."""
    torch.manual_seed(seed)
    (data, graph, _, sum_neighbours), how = problem(), settings[kind]
    net = GCN(data.features.shape[1], settings["hidden units"], 7, sum_neighbours)
    guide = guide and partial(guide, init_loc_fn=PretrainedInitializer.from_net(net))
    bnn = tyxe.VariationalBNN(net, prior, likelihood(), guide)

    if is_sampled:  # the loader yields labelled nodes only, so there is nothing to mask
        loader = batches("train", settings["mini-batch"], settings["neighbours"], shuffle=True)
        mask = nullcontext()
    else:
        loader = [((graph, data.features), data.labels)]
        mask = selective_mask(mask=data.masks["train"], expose=["likelihood.data"])
    optimizer = torch.optim.Adam(bnn.parameters(), lr=how["rate"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, how["cut every"] // len(loader), 0.1)
    rows = []

    def look(bnn, epoch, loss):
        schedule.step()
        if (step := (epoch + 1) * len(loader)) % how["look every"]:
            return
        logits = bnn.predict(graph, data.features, num_predictions=how["draws"])
        rows.append(scores(data, *(logits[data.masks[name]] for name in ("val", "test"))))
        rows[-1]["step"] = step

    with mask, handler():
        bnn.fit(loader, optimizer, how["steps"] // len(loader), look, progress=False)
    return min(rows, key=lambda row: row["NLL"]), bnn.to_module()


def normal(**which):
    """Return the prior N(0, 1) on a selection of weights."""
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), **which)


@cache
def maximum_a_posteriori(seed):
    """Return row and net: Laplace starts at it."""
    return fit(seed, "point", normal(), AutoDelta)


def laplace(seed, structure, size, is_tuned=False, last_layer=False):
    """Return the row of a Laplace approximation about the MAP estimate.

    The points of a batch must not influence each other in a layer with a curvature. In the last
    one they do not; in the first they do, so there a batch is one node with what it depends on.
    """
    net, samples = maximum_a_posteriori(seed)[1], settings["Laplace samples"]
    torch.manual_seed(seed)
    prior = normal(expose_all=False, expose_modules=[net.second]) if last_layer else normal()
    bnn = tyxe.LaplaceBNN(net, prior, likelihood(), structure=structure)
    bnn.fit_curvature(batches("train", size), progress=False)
    if is_tuned:
        grid = settings["tuned precisions"][structure]
        precision = bnn.optimize_prior_precision("grid", batches("val", size), grid=grid)
    else:
        precision = bnn.optimize_prior_precision()
    logits = [bnn.predict(batches(part, size), num_predictions=samples) for part in ("val", "test")]
    return {**scores(problem()[0], *logits), "prior precision": float(precision)}


def mean_field(seed, **how):
    """Return the row of a mean-field posterior."""
    guide = partial(AutoNormal, init_scale=1e-4, max_guide_scale=0.3)
    return fit(seed, "mean field", normal(), guide, **how)[0]


LAST = {"structure": "full", "size": 1_000, "last_layer": True}
KRON = {"structure": "kron", "size": 1}
METHODS = {
    "ML": lambda seed: fit(seed, "point", normal(hide_all=True))[0],
    "MAP": lambda seed: maximum_a_posteriori(seed)[0],
    "mean field": mean_field,
    "mean field, local reparam.": partial(mean_field, handler=local_reparameterization),
    "mean field, flipout": partial(mean_field, handler=flipout),
    "mean field, mini-batches": partial(mean_field, is_sampled=True),
    "last layer, Laplace": partial(laplace, **LAST),
    "last layer, Laplace, tuned": partial(laplace, **LAST, is_tuned=True),
    "Laplace, kron": partial(laplace, **KRON),
    "Laplace, kron, tuned": partial(laplace, **KRON, is_tuned=True),
}

names = args.methods or list(METHODS)
if unknown := [name for name in names if name not in METHODS]:
    parser.error(f"no method {unknown[0]!r}; expected some of: {'; '.join(METHODS)}")
if args.seeds < 1:
    parser.error(f"--seeds is {args.seeds}; expected a positive number")
path = args.out / "gnn.json"
if args.table and not path.exists():
    parser.error(f"there is no {path}; run without --table first")
if not args.table:
    try:
        problem()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from None
    args.out.mkdir(parents=True, exist_ok=True)
    run_missing(path, settings, args.backend, product(names, range(args.seeds)), METHODS)
print(table(json.loads(path.read_text())))
