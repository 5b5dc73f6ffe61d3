"""experiments/cora.py: message passing in each library, and mini-batches of nodes."""

import importlib.util
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import cora
import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.experiments.conftest import CLASSES, FEATURES, NODES, graph

MODULES = {"torch": "torch", "dgl": "dgl", "pyg": "torch_geometric"}
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(module) is None,
            reason=f"{module} is not installed: it is the extra {name!r}",
        ),
    )
    for name, module in MODULES.items()
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a stand-in for Cora, the first that is looked at."""
    np.savez(tmp_path / "cora.npz", **graph())
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def data(folder: Path):
    """Return the stand-in as the experiment reads it, in float64."""
    found = cora.cora()
    return replace(found, features=found.features.double())


def adjacency(data) -> torch.Tensor:
    """Return the matrix with a row for each node, and ones for its neighbours and itself."""
    matrix = torch.zeros(NODES, NODES, dtype=torch.double)
    edges = torch.from_numpy(graph()["edge_index"])
    matrix[edges[1], edges[0]] = 1.0
    return matrix + torch.eye(NODES, dtype=torch.double)


def net_of(sum_neighbours) -> nn.Module:
    return cora.GCN(FEATURES, 5, CLASSES, sum_neighbours).double()


# --------------------------------------------------------------------------- the experiment


@pytest.mark.parametrize("name", BACKENDS)
def test_smoke(name: str, folder: Path, smoke):
    found = smoke(cora.experiment, "--backend", name)
    assert list(found.cells) == [(name, method, "0") for method in cora.METHODS]
    nll = found.cells[name, "ML", "0"]["NLL"]
    assert f"| ML | {name} | 1 | {nll:.3f} (1.01 ± 0.04) |" in found.page


# --------------------------------------------------------------------------- message passing


@pytest.mark.parametrize("name", BACKENDS)
def test_sum_is_that_of_the_adjacency_matrix(name: str, data):
    graph_of, sum_neighbours = cora.backend(name)
    graph = graph_of(data.edges)
    h = torch.randn(NODES, 3, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(sum_neighbours(graph, h), adjacency(data) @ h)
    weights = torch.randn(NODES, 3, dtype=torch.double)
    (gradient,) = torch.autograd.grad((sum_neighbours(graph, h) * weights).sum(), h)
    torch.testing.assert_close(gradient, adjacency(data).mT @ weights)
    # Sums without a gradient are kept: another tensor, or graph, is not taken for the one before.
    for other in torch.randn(3, NODES, 3, dtype=torch.double):
        torch.testing.assert_close(sum_neighbours(graph, other), adjacency(data) @ other)
    alone = graph_of(replace(data.edges, source=data.edges.target))
    degrees = adjacency(data).sum(1, keepdim=True)
    torch.testing.assert_close(sum_neighbours(alone, other), degrees * other)


@pytest.mark.parametrize("name", BACKENDS)
def test_blocks_of_all_neighbours_give_the_outputs_of_the_whole_graph(name: str, data):
    graph_of, sum_neighbours = cora.backend(name)
    net = net_of(sum_neighbours)
    whole = net(graph_of(data.edges), data.features)
    nodes = data.masks["val"]
    loader = cora.NeighborLoader(data, [-1, -1], nodes, graph_of, batch_size=30)
    batches = list(loader)
    assert len(batches) == len(loader) == 4
    outputs = torch.cat([net(*inputs) for inputs, _ in batches])
    torch.testing.assert_close(outputs, whole[nodes])
    assert torch.equal(torch.cat([y for _, y in batches]), data.labels[nodes])
    shuffled = cora.NeighborLoader(data, [-1, -1], nodes, graph_of, 30, shuffle=True)
    again = torch.cat([net(*inputs) for inputs, _ in shuffled])
    assert not torch.equal(again[:30], outputs[:30])
    torch.testing.assert_close(again.sort(0).values, outputs.sort(0).values)


@pytest.mark.parametrize("name", BACKENDS)
def test_sampled_sum_is_unbiased(name: str, data):
    graph_of, sum_neighbours = cora.backend(name)
    repeats, count = 2_000, 2
    nodes = torch.arange(NODES) < 10
    loader = cora.NeighborLoader(data, [count], nodes, graph_of, batch_size=10)
    draws = []
    for _ in range(repeats):
        (((block,), features), _) = next(iter(loader))
        draws.append(sum_neighbours(block, features))
    sums = torch.stack(draws)
    expected = adjacency(data)[nodes] @ data.features
    # six standard errors, and rounding where nothing was left out
    bound = 6 * sums.std(0) / math.sqrt(repeats) + 1e-6
    assert bool(((sums.mean(0) - expected).abs() < bound).all())
    degrees = adjacency(data)[nodes].sum(1) - 1
    assert int(degrees.max()) > count
    is_fixed = sums.std(0).amax(1) < 1e-6
    assert torch.equal(is_fixed, degrees <= count)


# --------------------------------------------------------------------------- the loss


def flat_gradients(bnn) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in bnn.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", BACKENDS)
def test_mini_batches_estimate_the_loss_without_bias(name: str, data):
    """Over all batches, weighted by how many points count, loss and gradient are the full ones."""
    graph_of, sum_neighbours = cora.backend(name)
    graph, total = graph_of(data.edges), int(data.masks["train"].sum())
    guide = partial(tyxe.guides.AutoNormal, init_scale=0.1)
    prior, likelihood = tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.likelihoods.Categorical(total)
    bnn = tyxe.VariationalBNN(net_of(sum_neighbours), prior, likelihood, guide).double()
    optimizer = torch.optim.SGD(bnn.parameters(), lr=0.0)

    def step(batch, mask=None):
        torch.manual_seed(1)  # the same draw of the weights in each step
        mask = torch.ones(len(batch[1]), dtype=torch.bool) if mask is None else mask
        with tyxe.poutine.selective_mask(mask=mask, expose=["likelihood.data"]):
            history = bnn.fit([batch], optimizer, 1, beta=0.01, progress=False)
        terms = [history.loss[0], history.log_likelihood[0], history.kl[0]]
        return torch.cat([torch.tensor(terms, dtype=torch.double), flat_gradients(bnn)])

    whole = (graph, data.features), data.labels
    full = step(whole, data.masks["train"])
    loader = cora.NeighborLoader(data, [-1, -1], data.masks["train"], graph_of, batch_size=30)
    parts = [(len(batch[1]), step(batch)) for batch in loader]
    assert [size for size, _ in parts] == [30, 30, 30, 10]
    estimate = sum(size / total * found for size, found in parts)
    torch.testing.assert_close(estimate, full, rtol=1e-9, atol=1e-9)
    # and a batch alone is no such estimate, so the weights matter
    assert not torch.allclose(parts[0][1], full, rtol=1e-3)


def test_curvature_of_all_layers_wants_nodes_one_by_one(data):
    """One at a time, the curvature is the dense GGN over the Jacobians of those nodes."""
    graph_of, sum_neighbours = cora.backend("torch")
    net, nodes = net_of(sum_neighbours), torch.arange(NODES) < 4
    prior, likelihood = tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.likelihoods.Categorical(4)
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure="full").double()
    bnn.fit_curvature(cora.NeighborLoader(data, [-1, -1], nodes, graph_of), progress=False)
    values = {name: p.detach() for name, p in net.named_parameters()}

    def outputs(values):
        everything = (data.edges, data.features)
        return torch.func.functional_call(net, values, everything)[nodes]

    jacobians = torch.func.jacrev(outputs)(values)
    jacobian = torch.cat([jacobians[name].flatten(2) for name in values], 2)
    probs = outputs(values).softmax(-1).detach()
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    ggn = torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian).detach()
    # in the library's order a layer's bias follows each row of its weight: compare the spectra
    precision = bnn.net_guide.precision.to_dense()
    expected = ggn + torch.eye(len(ggn), dtype=torch.double)
    torch.testing.assert_close(torch.linalg.eigvalsh(precision), torch.linalg.eigvalsh(expected))
