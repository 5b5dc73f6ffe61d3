"""tyxe.integrations.pyg: masks of nodes, batches of neighbours, batches of graphs."""

import functools

import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("torch_geometric", reason="it is the extra 'pyg'")

from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCN, global_mean_pool

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.fits import assert_equal, trainable
from tyxe.integrations.pyg import unpack

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))


def graph(nodes=8):
    ring = torch.arange(nodes)
    pairs = torch.stack([ring, (ring + 1) % nodes])
    edges = torch.cat([pairs, pairs.flip(0)], 1)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, 3, generator=draw)
    return Data(x=x, edge_index=edges, y=ring % 2, train_mask=ring < 5, test_mask=ring >= 5)


def variational(net=None, size=5):
    torch.manual_seed(0)
    net = net or GCN(3, 8, 2, 2)
    return mean_field(net, tyxe.likelihoods.Categorical(size))


TRAIN = functools.partial(unpack, mask="train_mask")
TEST = functools.partial(unpack, mask="test_mask")


def fitted(batches, **options):
    bnn = variational()
    torch.manual_seed(1)
    bnn.fit(batches, ADAM, 3, **options)
    return bnn


def test_a_masked_graph_is_fitted_as_under_a_handler():
    data = graph()
    one = fitted([data], unpack=TRAIN)
    with tyxe.poutine.selective_mask(mask=data.train_mask, expose=["likelihood.data"]):
        two = fitted([((data.x, data.edge_index), data.y)])
    assert_equal(trainable(one), trainable(two), rtol=0, atol=1e-6)


def test_nodes_outside_of_a_mask_are_not_scored():
    data, bnn = graph(), variational()
    error, log_likelihood = bnn.evaluate([data], num_predictions=0, unpack=TEST)
    logits = bnn.predict([data], num_predictions=0, unpack=TEST)
    assert logits.shape == (8, 2)
    each = torch.distributions.Categorical(logits=logits).log_prob(data.y)
    torch.testing.assert_close(log_likelihood, each[5:].sum())
    assert error == (logits.argmax(-1) != data.y)[5:].sum()


def test_added_neighbours_do_not_count():
    """As batches of NeighborLoader are, whose compiled code the package index has not."""
    data = graph()
    batch = Data(x=data.x, edge_index=data.edge_index, y=data.y)
    batch.input_id, batch.batch_size = torch.arange(3), 3
    _, targets, weights = unpack(batch)
    assert torch.equal(targets, data.y)
    assert weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    batch.some_mask = torch.tensor([True, False] * 4)
    assert unpack(batch, "some_mask")[2].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]


def test_batches_of_graphs_have_a_target_each():
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = GCN(3, 8, 1), torch.nn.Linear(8, 2)

        def forward(self, x, edge_index, batch):
            return self.head(global_mean_pool(self.body(x, edge_index), batch))

    graphs = [graph(nodes) for nodes in (4, 5, 6)]
    for index, one in enumerate(graphs):
        one.y = torch.tensor([index % 2])
    of_graphs = functools.partial(unpack, inputs=("x", "edge_index", "batch"))
    batch = Batch.from_data_list(graphs)
    bnn = variational(Pooled(), size=3)
    bnn.fit([batch], ADAM, 2, unpack=of_graphs)
    assert bnn.predict([batch], num_predictions=2, unpack=of_graphs).shape == (3, 2)
