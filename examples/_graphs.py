"""For gnn.py: Cora, the sum over neighbours in each library, and mini-batches of nodes."""

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from _data import ROOT, folders
from torch import Tensor

# --------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Edges:
    """A graph, in no library's own format; in a batch, one that leads to fewer nodes.

    Attributes:
        source: of each edge, `(E,)`.
        target: of each edge, `(E,)`.
        weight: of each edge, `(E,)`, or None where all are one.
        sizes: numbers of nodes that edges leave, and that they reach.
    """

    source: Tensor
    target: Tensor
    weight: Tensor | None
    sizes: tuple[int, int]

    @property
    def device(self):
        """Where the edges are."""
        return self.source.device

    def to(self, device):
        """Return the same graph on another device."""
        weight = None if self.weight is None else self.weight.to(device)
        source, target = self.source.to(device), self.target.to(device)
        return replace(self, source=source, target=target, weight=weight)


@dataclass(frozen=True)
class GraphData:
    """All nodes: features `(n, d)`, labels `(n,)`, edges, and masks `(n,)` by name."""

    features: Tensor
    labels: Tensor
    edges: Edges
    masks: dict[str, Tensor]


def cora(reduced=False):
    """Return Cora with Planetoid's split: the masks `train`, `val` and `test`.

    The rows of the features sum to one. Edges run both ways, and from each node to itself.

    Args:
        reduced: the first 100 features and a tenth of the nodes in the masks, for a short run.

    Raises:
        FileNotFoundError: the file is in no folder, and could not be downloaded.
    """
    found = None
    for folder in folders():
        if found is None and (path := folder / "cora.npz").exists():
            with np.load(path) as arrays:
                found = {name: torch.from_numpy(arrays[name]) for name in arrays}
    found = found or _downloaded()
    count = len(found["labels"])
    source, target = torch.cat([found["edge_index"], torch.arange(count).expand(2, -1)], 1)
    features = found["features"][:, : 100 if reduced else None]
    some = torch.arange(count) % (10 if reduced else 1) == 0
    return GraphData(
        features / features.sum(1, keepdim=True).clamp(min=1),
        found["labels"],
        Edges(source, target, None, (count, count)),
        {name: found[f"{name}_mask"] & some for name in ("train", "val", "test")},
    )


def _downloaded():
    looked = f"no cora.npz in {', '.join(str(folder) for folder in folders())}"
    try:
        with _without_warning_of_jit():
            from torch_geometric.datasets import Planetoid
        data = Planetoid(str(ROOT / "data"), "Cora")[0]
    except (ImportError, OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{looked}, and torch-geometric could not download it: {error}. Set TYXE_DATA to a "
            'folder that has it, or, with a network, pip install -e ".[pyg]"'
        ) from error
    names = {"features": "x", "labels": "y", "edge_index": "edge_index"}
    names |= {mask: mask for mask in ("train_mask", "val_mask", "test_mask")}
    return {name: data[key] for name, key in names.items()}


# --------------------------------------------------------------------------- message passing


def torch_backend():
    """Return `graph_of(edges)` and `sum_neighbours(graph, h)` in plain PyTorch."""

    def sum_neighbours(graph, h):
        messages = h[graph.source]
        messages = messages if graph.weight is None else messages * graph.weight[:, None]
        return h.new_zeros(graph.sizes[1], h.shape[1]).index_add(0, graph.target, messages)

    return lambda edges: edges, sum_neighbours


def dgl_backend():
    """Return them as in DGL's tutorial: a `DGLGraph`, a message and its reduction."""
    from _dgl import dgl

    def graph_of(edges):
        pairs, (sources, targets) = (edges.source, edges.target), edges.sizes
        if sources == targets:
            graph = dgl.graph(pairs, num_nodes=sources)
        else:
            graph = dgl.create_block(pairs, num_src_nodes=sources, num_dst_nodes=targets)
        if edges.weight is not None:
            graph.edata["weight"] = edges.weight
        return graph

    def sum_neighbours(graph, h):
        is_weighted, message = "weight" in graph.edata, dgl.function.copy_u("h", "m")
        message = dgl.function.u_mul_e("h", "weight", "m") if is_weighted else message
        with graph.local_scope():
            graph.srcdata["h"] = h
            graph.update_all(message, dgl.function.sum("m", "sum"))
            return graph.dstdata["sum"]

    return graph_of, sum_neighbours


def pyg_backend():
    """Return them in PyTorch Geometric: a `Data` object, and a convolution without weights."""
    with _without_warning_of_jit():
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
    """Return `graph_of(edges)` and `sum_neighbours(graph, h)` of a library.

    The sum looks whether graph and features are on one device, and keeps its two latest results
    that no gradient passes: in a net of two layers that of the inputs is among them, which is the
    same in every forward with all nodes (PyTorch Geometric's `cached=True`).

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    try:
        graph_of, sum_neighbours = BACKENDS[name]()
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise ModuleNotFoundError(
            f'--backend {name} needs {missing}: pip install -e ".[{name}]"', name=missing
        ) from error
    kept = []  # triples of graph, features and sum, the latest first

    def checked(graph, h):
        place = graph.device if hasattr(graph, "device") else graph.edge_index.device
        if place != h.device:
            raise ValueError(
                f"the graph is on {place}, the features of its nodes are on {h.device}: pass "
                "device= to fit, which moves both, or call .to on the one that was left behind"
            )
        if h.requires_grad:
            return sum_neighbours(graph, h)
        found = next((one for one in kept if one[0] is graph and one[1] is h), None)
        found = found or (graph, h, sum_neighbours(graph, h))
        kept[:] = [found, *(one for one in kept if one is not found)][:2]
        return found[2]

    return graph_of, checked


@contextmanager
def _without_warning_of_jit():
    # torch-geometric 2.8 uses torch.jit.script, which torch 2.15 calls deprecated.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
        yield


# --------------------------------------------------------------------------- mini-batches


class NeighborLoader:
    """Batches of nodes with sampled neighbourhoods, `((blocks, features), labels)`.

    A block for each layer of the net holds the edges into the nodes that the layer computes. The
    last one ends in the batch's own nodes: the net has an output for each label, and the
    likelihood scales the batch by `N / S`, as any other. Where `k` of `d` neighbours were drawn,
    their edges weigh `d / k`, so that the expected sum is that of all. Every node keeps its edge
    to itself, and gets one where it had none.

    PyTorch Geometric's class of that name is called likewise, but wants compiled code.

    Args:
        data: all nodes.
        num_neighbors: how many to draw, for the output layer first; -1 for all.
        input_nodes: a mask of those that batches are made of.
        graph_of: from `Edges` to a library's graph.
        batch_size: how many of them make a batch.
        shuffle: take them in another order each time.

    Raises:
        TypeError: the mask is not boolean.
        ValueError: the mask's length is not the number of nodes.
    """

    def __init__(self, data, num_neighbors, input_nodes, graph_of, batch_size=1, shuffle=False):
        if input_nodes.dtype != torch.bool:
            raise TypeError(f"input_nodes is {input_nodes.dtype}; expected a boolean mask")
        if input_nodes.shape != data.labels.shape:
            given, expected = tuple(input_nodes.shape), tuple(data.labels.shape)
            raise ValueError(f"input_nodes has shape {given}; the graph's nodes need {expected}")
        self.data, self.graph_of, self.num_neighbors = data, graph_of, num_neighbors
        self.nodes, self.batch_size = input_nodes.nonzero().squeeze(1), batch_size
        self.shuffle = shuffle
        edges = data.edges
        others = edges.source != edges.target
        order = edges.target[others].argsort(stable=True)
        # The neighbours of node i are self._neighbors[self._starts[i] : self._starts[i + 1]].
        self._neighbors = edges.source[others][order]
        self._degrees = edges.target[others].bincount(minlength=len(data.labels))
        self._starts = self._degrees.cumsum(0) - self._degrees

    def __len__(self):
        return math.ceil(len(self.nodes) / self.batch_size)

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
            order = order[target[order].argsort(stable=True)]
            source, kept = source[order], place < count
            source, target = source[kept], target[kept]
            weight = (degrees[target] / count).clamp(min=1).to(weight.dtype)
        new = source[~torch.isin(source, nodes)].unique()
        known = torch.cat([nodes, new])
        number = torch.empty(len(self._degrees), dtype=torch.long)
        number[known] = torch.arange(len(known))
        own = torch.arange(len(nodes))
        source, target = torch.cat([number[source], own]), torch.cat([target, own])
        weight = torch.cat([weight, weight.new_ones(len(nodes))])
        return Edges(source, target, weight, (len(known), len(nodes))), known
