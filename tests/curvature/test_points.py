"""Where maps hold the points: in any order, in cells, and where points influence each other."""

import pytest
import torch
import torch.nn as nn

from tests.oracles.curvature import HIDDEN, jacobian_of, laplace, through
from tests.oracles.nets import NetOf


def precision_by(bnn, batches):
    bnn.fit_curvature(batches, progress=False)
    return bnn.net_guide.precision.to_dense()


@pytest.mark.filterwarnings("ignore:the net's outputs do not depend on site net.inner")
@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_points_are_found_where_a_map_holds_them(kind, structure):
    """As by one point after the other, for which there is no order."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 4, 3).double(), torch.arange(5) % 2
    bnn = laplace(through(kind), structure)
    expected = precision_by(bnn, [(x[n : n + 1], y[n : n + 1]) for n in range(5)])
    # A first batch of one point tells nothing of where a second has them.
    for split in (2, 1, 4):
        found = precision_by(bnn, [(x[:split], y[:split]), (x[split:], y[split:])])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    variance = bnn.functional_variance(x)
    alone = torch.cat([bnn.functional_variance(x[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(variance, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["second", "folded", "recurrent"])
def test_a_first_batch_that_does_not_tell_where_the_points_are(kind):
    """Its sequences are of one step: any order would do."""
    torch.manual_seed(0)
    short, long = torch.randn(3, 1, 3).double(), torch.randn(6, 4, 3).double()
    y = torch.arange(9) % 2
    bnn = laplace(through(kind), "diag", points=9)
    points = [*short.split(1), *long.split(1)]
    expected = precision_by(bnn, [(x, y[n : n + 1]) for n, x in enumerate(points)])
    for batches in ([(short, y[:3]), (long, y[3:])], [(long, y[3:]), (short, y[:3])]):
        found = precision_by(bnn, batches)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def reordered(order_of):
    """A net with points in an order of its own inside, as of packed sequences."""

    def forward(net, x):
        order = order_of(x)
        return net.outer(net.inner(x[order]).tanh()[order.argsort()])

    return NetOf(forward, inner=nn.Linear(3, 4), outer=nn.Linear(4, 2))


ORDERS = {
    "backwards": lambda x: torch.arange(len(x)).flip(0),
    "two exchanged": lambda x: torch.tensor([2, 1, 0, 3, 4] if len(x) == 5 else [0]),
    "sorted": lambda x: x[:, 0].argsort(),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_points_in_another_order_inside_of_a_net_are_each_by_itself(order, structure):
    torch.manual_seed(0)
    net = reordered(ORDERS[order])
    x, y = torch.randn(5, 3).double(), torch.arange(5) % 2
    bnn = laplace(net, structure)
    bnn.fit_curvature([(x[n : n + 1], y[n : n + 1]) for n in range(5)], progress=False)
    evidence = bnn.log_marginal_likelihood()
    alone = torch.cat([bnn.functional_variance(x[n : n + 1]) for n in range(5)])
    together = laplace(net, structure)
    together.fit_curvature([(x, y)], progress=False)
    torch.testing.assert_close(together.log_marginal_likelihood(), evidence)
    torch.testing.assert_close(together.functional_variance(x), alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_points_that_influence_each_other_have_no_curvature(structure):
    def forward(net, x):
        h = net.inner(x).tanh().sum(1)
        return net.outer(h - h.mean(0))

    bnn = laplace(NetOf(forward, inner=nn.Linear(3, 4), outer=nn.Linear(4, 2)), structure)
    with pytest.raises(ValueError, match=r"'net\.inner\.weight'.*\(5, 4, 4\) for 5 data points"):
        bnn.fit_curvature([(torch.randn(5, 4, 3).double(), torch.zeros(5).long())], progress=False)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("kept", [5, 3])
def test_nodes_of_a_graph_influence_each_other(structure, kept):
    """In a batch of all nodes, and in one of some with what they depend on."""

    adjacency = torch.eye(5).double() + torch.eye(5).double().roll(1, 0)
    adjacency[0] = adjacency[:, 0] = torch.eye(5)[0]  # a node by itself

    def forward(net, x):
        h = net.first(adjacency @ x).tanh()
        return net.second((adjacency @ h)[:kept])

    def convolved():
        return NetOf(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))

    data = [(torch.randn(5, 3).double(), torch.zeros(kept).long())]
    with pytest.raises(ValueError, match=r"'net\.first\.weight'.*as nodes of a graph do"):
        laplace(convolved(), structure).fit_curvature(data, progress=False)
    last = laplace(convolved(), structure, rules={"hide_modules": ["first"]})
    last.fit_curvature(data, progress=False)
    assert last.functional_variance(data[0][0]).shape == (kept, 2, 2)


def queries():
    """Learned queries attend to a set; their projection sees no point."""

    def forward(net, x):
        x = x.view(len(x), 2, 3)
        scores = torch.softmax(net.q(net.z) @ net.k(x).mT, -1)
        return net.o((scores @ net.v(x)).flatten(1))

    layers = {name: nn.Linear(3, 4) for name in "qkv"}
    return NetOf(forward, z=nn.Parameter(torch.randn(2, 3)), **layers, o=nn.Linear(8, 2))


def hypernet():
    """The weights of a layer are made by another, from a code of the layer."""
    code = torch.randn(3).double()
    return NetOf(
        lambda net, x: net.last(torch.tanh(x @ net.made(code).view(6, 4))),
        made=nn.Linear(3, 24),
        last=nn.Linear(4, 2),
    )


def normed():
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Linear(4, 2))
    net.train()(torch.randn(5, 6))
    return net


@pytest.mark.parametrize("size", [5, 2, 1])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("net_of", [queries, hypernet, normed])
def test_maps_of_which_no_row_is_a_point_take_a_gradient_for_each(net_of, structure, size):
    torch.manual_seed(0)
    net, x, y = net_of().double().eval(), torch.randn(5, 6).double(), torch.arange(5) % 2
    bnn = laplace(net, structure)
    loader = [(x[i : i + size], y[i : i + size]) for i in range(0, 4 if size == 2 else 5, size)]
    loader += [(x[4:].repeat(2, 1), y[4:].repeat(2))] if size == 2 else []
    bnn.likelihood.dataset_size = sum(len(labels) for _, labels in loader)
    bnn.fit_curvature(loader, progress=False)
    sites = [name.removeprefix("net.") for name in bnn.state.blocks.sites]
    curvature = 0.0
    for rows, _ in loader:
        jacobian = jacobian_of(net, rows, sites)
        probs = net(rows).softmax(-1).detach()
        hessian = torch.diag_embed(probs) - probs[..., None] * probs[:, None]
        curvature = curvature + torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)
    precision = curvature if structure == "full" else torch.diag(curvature.diagonal())
    precision = precision + torch.eye(len(precision)).double()
    found = bnn.net_guide.precision.logdet()
    torch.testing.assert_close(found, torch.logdet(precision), rtol=1e-8, atol=1e-8)
    fresh = laplace(net, structure)
    fresh.load_state_dict(bnn.state_dict())
    one = fresh.functional_variance(x[:1])
    many = bnn.functional_variance(x if size > 1 else x[:1])
    torch.testing.assert_close(one, many[:1], rtol=1e-8, atol=1e-10)
