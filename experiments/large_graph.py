"""A graph of 100,000 nodes by neighbour sampling: what mean field costs beside the plain net.

A stochastic block model: nodes of ten classes, whose edges go to their own class more often than to
others, and features that tell the class only in part. The net is that of cora.py, and its loader
draws neighbours (sampled), so that an epoch is one pass over the labelled nodes by batches; with
`--backend dgl` DGL's own loader does as well (sampled by DGL). Beside them, for its cost alone, a
few epochs of the whole graph, each one step with a mask. CPU seconds of an epoch include its
loader; the peak of memory in training is above what the process held before (Linux); both are after
one epoch that warms up. The plain net has no prior and no guide, in the same code.
"""

import ctypes
import gc
import sys
import time
import warnings
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path

import common
import runner
import tables
import torch
from common import normal
from cora import GCN, Edges, GraphData, NeighborLoader, backend, import_dgl

import tyxe
from tyxe.poutine import local_reparameterization, selective_mask

METHODS = {
    "plain net": (None, nullcontext),
    "mean field": ({"init_scale": 1e-2, "max_guide_scale": 0.3}, nullcontext),
    "mean field, local reparam.": (
        {"init_scale": 1e-2, "max_guide_scale": 0.3},
        local_reparameterization,
    ),
}
WAYS = ["sampled", "sampled by DGL", "whole graph"]
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f"}
FORMATS |= {"seconds an epoch": ".2f", "peak MB": ".0f"}
MEMORY = Path("/proc/self")


def check(s):
    if 2 * s.labelled > s.nodes:
        needed = f"expected at least {2 * s.labelled}, to train and to test"
        raise ValueError(f"--nodes is {s.nodes}; {needed}")


def block_model(s, seed):
    """Return a graph of the model: a Poisson number of edges inside classes and between them."""
    torch.manual_seed(seed)
    labels = torch.arange(s.nodes) % s.classes
    size = s.nodes // s.classes
    pairs = []
    for neighbours, is_inside in ((s.inside, True), (s.outside, False)):
        # Each edge runs both ways, so that half as many are drawn.
        source = torch.randint(s.nodes, (round(neighbours * s.nodes / 2),))
        shift = 0 if is_inside else torch.randint(1, s.classes, source.shape)
        block = (labels[source] + shift) % s.classes
        target = s.classes * torch.randint(size, source.shape) + block
        pairs.append(torch.stack([source, target]))
    drawn = torch.cat(pairs, 1)
    drawn = drawn[:, drawn[0] != drawn[1]]
    codes = torch.cat([drawn[0] * s.nodes + drawn[1], drawn[1] * s.nodes + drawn[0]]).unique()
    own = torch.arange(s.nodes)
    source, target = torch.cat(
        [torch.stack([codes // s.nodes, codes % s.nodes]), own.expand(2, -1)], 1
    )
    centres = torch.randn(s.classes, s.features)
    features = centres[labels] + s.noise * torch.randn(s.nodes, s.features)
    # A sum over as many nodes is of the size of one.
    features = features / (s.noise * (1 + s.inside + s.outside) ** 0.5)
    order = torch.randperm(s.nodes)
    masks = {"train": order < s.labelled, "test": order >= s.nodes - s.labelled}
    edges = Edges(source, target, torch.ones(len(source)), (s.nodes, s.nodes))
    return GraphData(features, labels, edges, masks)


@cache
def problem(s, name, seed):
    try:
        graph_of, sum_neighbours = backend(name)
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    nodes = block_model(s, seed)
    return nodes, graph_of(nodes.edges), graph_of, sum_neighbours


class DGLLoader:
    """The batches of `NeighborLoader`, drawn by DGL: `((blocks, features), labels)`.

    A node's edge to itself is drawn as the others are. Where `k` of `d` edges were drawn they weigh
    `d / k`, so that the expected sum is that of all.
    """

    def __init__(self, nodes, graph, neighbours, batch):
        import_dgl().seed(int(torch.randint(2**31, ())))  # it draws by a generator of its own
        from dgl.dataloading import DataLoader, NeighborSampler

        labelled, sampler = nodes.masks["train"].nonzero().squeeze(1), NeighborSampler(neighbours)
        how = {"batch_size": batch, "shuffle": True}
        self.nodes, self.degrees = nodes, graph.in_degrees()
        self.loader = DataLoader(graph, labelled, sampler, **how)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        with warnings.catch_warnings():  # it would have workers, and a core for each
            warnings.filterwarnings("ignore", "Dataloader CPU affinity")
            batches = iter(self.loader)
        for inputs, outputs, blocks in batches:
            for block in blocks:
                share = self.degrees[block.dstdata["_ID"]] / block.in_degrees()
                block.edata["weight"] = share[block.edges()[1]]
            yield (tuple(blocks), self.nodes.features[inputs]), self.nodes.labels[outputs]


def memory(name):
    """Return a line of the process's memory, in MB: `VmRSS` now, `VmHWM` at its peak."""
    for line in (MEMORY / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"{MEMORY}/status has no {name}")


def peak_above(function):
    """Call a function; return the peak of memory during it, above what was held before, in MB."""
    gc.collect()
    if not (MEMORY / "clear_refs").exists():
        return function(), None
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # else what a former cell has freed is held, and serves this one
    (MEMORY / "clear_refs").write_text("5")  # the peak starts anew
    before = memory("VmRSS")
    return function(), memory("VmHWM") - before


def run(s, method, way, name, seed):
    nodes, graph, graph_of, sum_neighbours = problem(s, name, seed)
    torch.manual_seed(seed)
    net = GCN(s.features, s.hidden_units, s.classes, sum_neighbours)
    guide, handler = METHODS[method]
    prior = normal(hide_all=guide is None)
    guide = guide and common.mean_field(net, **guide)
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(s.labelled), guide)
    mask, epochs = nullcontext(), s.epochs
    # Loaders yield labelled nodes only, so there is nothing to mask.
    if way == "sampled":
        how = s.neighbours, nodes.masks["train"], graph_of, s.batch
        loader = NeighborLoader(nodes, *how, shuffle=True)
    elif way == "sampled by DGL":
        loader = DGLLoader(nodes, graph, s.neighbours, s.batch)
    else:
        loader = [((graph, nodes.features), nodes.labels)]
        mask = selective_mask(mask=nodes.masks["train"], expose=["likelihood.data"])
        epochs = s.steps
    adam, times = partial(torch.optim.Adam, lr=s.rate), []

    def fit(epochs):
        with mask, handler():
            bnn.fit(
                loader, adam, epochs, lambda *_: times.append(time.process_time()), progress=False
            )

    fit(1)  # what is loaded and kept at a first step is no cost of training
    peak = peak_above(partial(fit, epochs))[1]
    later = [after - before for before, after in pairwise(times[1:])]
    found = {"seconds an epoch": sum(later) / len(later), "edges": len(nodes.edges.source)}
    found |= {} if peak is None else {"peak MB": peak}
    if way != "whole graph":
        logits = bnn.predict(graph, nodes.features, num_predictions=s.draws)
        test = nodes.masks["test"]
        found |= tables.scores(logits[test].softmax(-1), nodes.labels[test], 10)
    return found


def is_possible(s, method, way, name, seed):
    return way != "sampled by DGL" or name == "dgl"


def table(record):
    names = dict.fromkeys(key[2] for key in record.cells)
    rows = {
        (method, way, name): [*record.of(method, way, name).values()]
        for name, way, method in product(names, WAYS, METHODS)
    }
    found = {key: cells for key, cells in rows.items() if cells}
    return tables.score_table(found, FORMATS, None, ("batches", "backend", "seeds"))


names = {"method": "methods", "way": "ways", "backend": "backend", "seed": "seeds"}
cells, choices = runner.every(run, is_possible, **names), {"methods": METHODS}
experiment = runner.Experiment("large_graph", cells, table, choices=choices, check=check)
