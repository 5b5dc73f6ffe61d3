"""A graph convolutional net on Cora, by ML, MAP, mean field and Laplace [T 5.3.1, tab. 5.2].

Two layers, 1433-16-7 with a ReLU between; each is a linear map after the plain sum over neighbours
and the node itself, in DGL, PyTorch Geometric or plain PyTorch. Planetoid's split; features sum to
one, all nodes make a batch, a mask leaves those without a label out of the loss. NLL is the lowest
on validation nodes of all times that the net was looked at, the other columns are those of test
nodes then; ± is two standard errors. Beyond the paper: other ways of sampling, mini-batches of
neighbour-sampled nodes, Laplace about the MAP, its prior precision by the highest evidence or the
lowest validation NLL (tuned).
"""

import importlib.util
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from types import ModuleType

import common
import planetoid
import runner
import tables
import torch
from common import normal
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn

import tyxe
from tyxe.poutine import flipout, local_reparameterization, selective_mask

# [T tab. 5.2], mean and two standard errors of five runs.
PUBLISHED = runner.SETTINGS["cora"]["facts"]["published"]
FORMATS = {"NLL": ".3f", "accuracy %": ".2f", "ECE %": ".2f", "test NLL": ".3f"}
METHODS = {
    "ML": lambda *on: fit(*on, on[0].point, normal(hide_all=True))[0],
    "MAP": lambda *on: maximum_a_posteriori(*on)[0],
    "mean field": lambda *on: mean_field(*on),
    "mean field, local reparam.": lambda *on: mean_field(*on, handler=local_reparameterization),
    "mean field, flipout": lambda *on: mean_field(*on, handler=flipout),
    "mean field, mini-batches": lambda *on: mean_field(*on, is_sampled=True),
    "last layer, Laplace": lambda *on: laplace(*on, "full"),
    "last layer, Laplace, tuned": lambda *on: laplace(*on, "full", is_tuned=True),
    "Laplace, kron": lambda *on: laplace(*on, "kron"),
    "Laplace, kron, tuned": lambda *on: laplace(*on, "kron", is_tuned=True),
}


@dataclass(frozen=True, eq=False)
class Edges:
    """Where edges leave, where they go, and their weights, `(E,)`; the numbers of such nodes."""

    source: Tensor
    target: Tensor
    weight: Tensor
    sizes: tuple[int, int]

    def to(self, device):
        tensors = self.source, self.target, self.weight
        return Edges(*(part.to(device) for part in tensors), self.sizes)


@dataclass(frozen=True)
class GraphData:
    """All nodes: features `(n, d)`, labels `(n,)`, edges, and masks `(n,)` by name."""

    features: Tensor
    labels: Tensor
    edges: Edges
    masks: dict[str, Tensor]


def cora(reduced=False):
    """Return Cora with masks `train`, `val` and `test`; edges run both ways, and to their node."""
    if not common.find("cora.npz"):
        try:
            planetoid.download()
        except (ImportError, OSError, ValueError) as error:
            raise FileNotFoundError(
                f"{common.looked('cora.npz')}, and it could not be downloaded: {error}. "
                "Set TYXE_DATA to a folder that has it"
            ) from error
    found = common.arrays("cora.npz")
    count = len(found["labels"])
    source, target = torch.cat([found["edge_index"], torch.arange(count).expand(2, -1)], 1)
    features = found["features"][:, : 100 if reduced else None]
    some = torch.arange(count) % (10 if reduced else 1) == 0
    masks = {name: found[f"{name}_mask"] & some for name in ("train", "val", "test")}
    rows = features / features.sum(1, keepdim=True).clamp(min=1)
    edges = Edges(source, target, rows.new_ones(len(source)), (count, count))
    return GraphData(rows, found["labels"], edges, masks)


def torch_backend():
    def sum_neighbours(graph, h):
        messages = h[graph.source] * graph.weight[:, None].to(h)
        return h.new_zeros(graph.sizes[1], h.shape[1]).index_add(0, graph.target, messages)

    return lambda edges: edges, sum_neighbours


def import_dgl():
    """Import DGL on a torch that is newer than that of its last wheel on the index, 2.1.0.

    Two of its imports fail, and neither matters to message passing: `dgl.graphbolt`, data loading,
    and, where it is missing, `setuptools.extern.packaging`, a copy of `packaging`.
    """
    if "dgl" not in sys.modules and importlib.util.find_spec("dgl") is not None:
        import packaging.version

        # Else DGL writes a file of settings into the home folder.
        os.environ.setdefault("DGLBACKEND", "pytorch")
        sys.modules["dgl.graphbolt"] = ModuleType("dgl.graphbolt")
        try:
            import setuptools.extern.packaging  # noqa: F401
        except ImportError:
            sys.modules["setuptools.extern.packaging"] = stand_in = ModuleType("packaging")
            stand_in.version = packaging.version
    import dgl

    return dgl


def dgl_backend():
    dgl = import_dgl()

    def graph_of(edges):
        pairs, (sources, targets) = (edges.source, edges.target), edges.sizes
        if sources == targets:
            graph = dgl.graph(pairs, num_nodes=sources)
        else:
            graph = dgl.create_block(pairs, num_src_nodes=sources, num_dst_nodes=targets)
        graph.edata["weight"] = edges.weight
        return graph

    def sum_neighbours(graph, h):
        message = dgl.function.u_mul_e("h", "weight", "m")
        with graph.local_scope():
            graph.srcdata["h"], graph.edata["weight"] = h, graph.edata["weight"].to(h)
            graph.update_all(message, dgl.function.sum("m", "sum"))
            return graph.dstdata["sum"]

    return graph_of, sum_neighbours


def pyg_backend():
    from torch_geometric.data import Data
    from torch_geometric.nn import SimpleConv

    convolution = SimpleConv(aggr="sum")

    def graph_of(edges):
        pairs = torch.stack([edges.source, edges.target])
        sizes = {"sizes": edges.sizes, "num_nodes": edges.sizes[0]}
        return Data(edge_index=pairs, edge_weight=edges.weight, **sizes)

    def sum_neighbours(graph, h):
        return convolution((h, None), graph.edge_index, graph.edge_weight, graph.sizes)

    return graph_of, sum_neighbours


BACKENDS = {"dgl": dgl_backend, "pyg": pyg_backend, "torch": torch_backend}


def backend(name):
    """Return `graph_of(edges)` and `sum_neighbours(graph, h)` of a library."""
    try:
        graph_of, sum_neighbours = BACKENDS[name]()
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        message = f'--backend {name} needs {missing}: pip install -e ".[{name}]"'
        raise ModuleNotFoundError(message, name=missing) from error
    kept = {}  # the last two, which live as long: the sum of the inputs is always the same

    def remembered(graph, h):
        if h.requires_grad:
            return sum_neighbours(graph, h)
        key = id(graph), id(h)
        kept[key] = kept.pop(key, None) or (sum_neighbours(graph, h), graph, h)
        if len(kept) > 2:
            del kept[next(iter(kept))]
        return kept[key][0]

    return graph_of, remembered


class NeighborLoader:
    """Batches of nodes with sampled neighbourhoods, `((blocks, features), labels)`.

    A block for each layer of the net holds the edges into the nodes that the layer computes, the
    last one those into the batch's own nodes. Where `k` of `d` neighbours were drawn (-1: all; for
    the output layer first), their edges weigh `d / k`, so that the expected sum is that of all; a
    node always keeps its edge to itself. PyTorch Geometric's class of that name is called likewise,
    but wants compiled code.
    """

    def __init__(self, data, num_neighbors, input_nodes, graph_of, batch_size=1, shuffle=False):
        self.data, self.graph_of, self.num_neighbors = data, graph_of, num_neighbors
        self.nodes, self.batch_size = input_nodes.nonzero().squeeze(1), batch_size
        self.shuffle, edges = shuffle, data.edges
        others = edges.source != edges.target
        order = edges.target[others].argsort(stable=True)
        # The neighbours of node i are self._neighbors[self._starts[i] : self._starts[i + 1]].
        self._neighbors = edges.source[others][order]
        self._degrees = edges.target[others].bincount(minlength=len(data.labels))
        self._starts = self._degrees.cumsum(0) - self._degrees

    def __len__(self):
        return -(-len(self.nodes) // self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.nodes)) if self.shuffle else torch.arange(len(self.nodes))
        for seeds in self.nodes[order].split(self.batch_size):
            blocks, nodes = [], seeds
            for count in self.num_neighbors:
                edges, nodes = self._into(nodes, count)
                blocks.insert(0, self.graph_of(edges))
            yield (tuple(blocks), self.data.features[nodes]), self.data.labels[seeds]

    def _into(self, nodes, count):
        """Return edges into some nodes, and the nodes that they come from: those first."""
        degrees = self._degrees[nodes]
        target = torch.arange(len(nodes)).repeat_interleave(degrees)
        place = torch.arange(len(target)) - (degrees.cumsum(0) - degrees)[target]
        source = self._neighbors[self._starts[nodes][target] + place]
        weight = self.data.features.new_ones(len(target))
        if count >= 0:
            # In random order within each node, the first of them are a draw without replacement.
            order = torch.rand(len(target)).argsort()
            order, kept = order[target[order].argsort(stable=True)], place < count
            source, target = source[order][kept], target[kept]
            weight = (degrees[target] / count).clamp(min=1).to(weight.dtype)
        known = torch.cat([nodes, source[~torch.isin(source, nodes)].unique()])
        number, own = torch.empty_like(self._degrees), torch.arange(len(nodes))
        number[known] = torch.arange(len(known))
        pairs = (number[source], own), (target, own), (weight, weight.new_ones(len(nodes)))
        return Edges(*map(torch.cat, pairs), (len(known), len(nodes))), known


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
def problem(s, name):
    try:
        nodes, (graph_of, sum_neighbours) = cora(reduced=s.smoke_test), backend(name)
    except (ModuleNotFoundError, FileNotFoundError) as error:
        sys.exit(str(error))
    likelihood = tyxe.likelihoods.Categorical(int(nodes.masks["train"].sum()))
    return nodes, graph_of(nodes.edges), graph_of, sum_neighbours, likelihood


def scores(nodes, validation, test):
    seen, labels = (nodes.labels[nodes.masks[name]] for name in ("val", "test"))
    found = tables.scores(test.softmax(-1), labels, 10)
    nll = tyxe.metrics.nll(validation.softmax(-1), seen).item()
    return found | {"NLL": nll, "test NLL": found["NLL"]}


def fit(s, name, seed, how, prior, guide=None, handler=nullcontext, is_sampled=False):
    torch.manual_seed(seed)
    (nodes, graph, graph_of, sum_neighbours, likelihood), rows = problem(s, name), []
    net = GCN(nodes.features.shape[1], s.hidden_units, 7, sum_neighbours)
    guide = guide and common.mean_field(net, **guide)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    loader = [((graph, nodes.features), nodes.labels)]
    labelled = nodes.masks["train"]
    mask = selective_mask(mask=labelled, expose=["likelihood.data"])
    if is_sampled:  # the loader yields labelled nodes only, so there is nothing to mask
        how_many = s.neighbours, labelled, graph_of, s.mini_batch
        loader, mask = NeighborLoader(nodes, *how_many, shuffle=True), nullcontext()
    optimizer = torch.optim.Adam(bnn.parameters(), lr=how["rate"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, how["cut every"] // len(loader), 0.1)

    def look(bnn, epoch, loss):
        schedule.step()
        if (step := (epoch + 1) * len(loader)) % how["look every"] == 0:
            logits = bnn.predict(graph, nodes.features, num_predictions=how["draws"])
            row = scores(nodes, *(logits[nodes.masks[part]] for part in ("val", "test")))
            rows.append(row | {"step": step})

    with mask, handler():
        bnn.fit(loader, optimizer, how["steps"] // len(loader), look, progress=False)
    return min(rows, key=lambda row: row["NLL"]), bnn.to_module()


@cache
def maximum_a_posteriori(s, name, seed):
    return fit(s, name, seed, s.point, normal(), {"guide": AutoDelta})


def mean_field(s, name, seed, **how):
    guide = {"init_scale": 1e-4, "max_guide_scale": 0.3}
    return fit(s, name, seed, s.mean_field, normal(), guide, **how)[0]


def laplace(s, name, seed, structure, is_tuned=False):
    net, nodes, graph_of = maximum_a_posteriori(s, name, seed)[1], *problem(s, name)[0:3:2]
    torch.manual_seed(seed)
    last_layer = {"expose_all": False, "expose_modules": [net.second]}
    # The points of a batch must not influence each other in a layer with a curvature. In the last
    # one they do not; in the first they do, so there a batch is one node with what it depends on.
    rules, size = (last_layer, 1_000) if structure == "full" else ({}, 1)
    bnn = tyxe.LaplaceBNN(net, normal(**rules), problem(s, name)[-1], structure=structure)
    loader = partial(NeighborLoader, nodes, (-1, -1), graph_of=graph_of, batch_size=size)
    train, held_out, test = (loader(mask) for mask in nodes.masks.values())
    bnn.fit_curvature(train, progress=False)
    how = {"method": "grid", "loader": held_out, "grid": s.tuned_precisions[structure]}
    precision = bnn.optimize_prior_precision(**(how if is_tuned else {}))
    logits = [bnn.predict(nodes, num_predictions=s.Laplace_samples) for nodes in (held_out, test)]
    return {**scores(nodes, *logits), "prior precision": float(precision)}


def run(s, name, method, seed):
    return METHODS[method](s, name, seed)


def table(record):
    pairs = product(record.names(), METHODS)
    rows = {(method, name): [*record.of(name, method).values()] for name, method in pairs}
    rows = {name: found for name, found in rows.items() if found}
    known = {
        method: [f"{mean:.2f} ± {error:.2f}" for mean, error in row.values()]
        for method, row in PUBLISHED.items()
    }
    return tables.score_table(rows, FORMATS, known, ("backend", "seeds"), errors=2)


cells = runner.every(run, backend="backend", method="methods", seed="seeds")
experiment = runner.Experiment("cora", cells, table, choices={"methods": METHODS})
