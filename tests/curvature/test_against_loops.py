"""Curvature against the naive loop over points and outputs, written out densely."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tyxe
from tests.oracles.architectures import Recurrent, TiedLanguageModel
from tests.oracles.curvature import (
    curvature_of,
    dense_jacobian,
    dense_products,
    linearizing,
    low_rank_precision,
)
from tests.oracles.nets import NetOf
from tyxe.curvature import CurvatureProducts
from tyxe.distributions.param_blocks import LinearBlock, SiteBlock
from tyxe.linalg import BlockDiagonal


def attends():
    """Self-attention, then a mean over positions."""
    return NetOf(
        lambda net, x: net.head(net.attention(x, x, x, need_weights=False)[0].mean(1)),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, 2),
    )


def twice():
    """One layer, applied twice."""
    return NetOf(lambda net, x: net.layer(net.layer(x).tanh()), layer=nn.Linear(3, 3))


def branch():
    """One of two layers, by the inputs, which torch.vmap does not take."""
    return NetOf(
        lambda net, x: net.taken(x) if x.isfinite().all() else net.other(x),
        taken=nn.Linear(3, 2),
        other=nn.Linear(3, 2),
    )


def conv(*layers):
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))


def normed():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    net[1].running_mean.normal_()
    return net


TOKENS = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1]])
# The net, and the shape of its input (or the input).
NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)),
        (5, 3),
    ),
    "branch": (branch, (5, 3)),
    "conv1d": (lambda: conv(nn.Conv1d(2, 3, 3, stride=2, padding=1)), (3, 2, 7)),
    "conv2d": (lambda: conv(nn.Conv2d(2, 3, 2, dilation=2)), (3, 2, 4, 4)),
    "grouped": (lambda: conv(nn.Conv2d(4, 6, 2, groups=2)), (3, 4, 3, 3)),
    "depthwise": (
        lambda: conv(nn.Conv2d(3, 3, 2, groups=3, padding_mode="circular", padding=1)),
        (3, 3, 3, 3),
    ),
    "conv3d": (lambda: conv(nn.Conv3d(2, 2, 2)), (3, 2, 3, 3, 3)),
    "transposed": (
        lambda: conv(nn.ConvTranspose2d(2, 3, 2, stride=2, padding=1, output_padding=1)),
        (3, 2, 3, 3),
    ),
    "transposed grouped": (lambda: conv(nn.ConvTranspose1d(4, 2, 3, groups=2)), (3, 4, 3)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 2)),
        (3, 5, 3),
    ),
    "normed": (normed, (5, 3)),
    "attention": (attends, (3, 4, 4)),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(12, 2),
        ),
        (2, 3, 4),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), (3, 3, 2)),
    "tied": (TiedLanguageModel, TOKENS),
    "twice": (twice, (4, 3)),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 1)),
        (2, 1, 3, 3),
    ),
}


def made(case, points=None):
    """A BNN over a net (or that of a name), its values, inputs, and how to linearise it."""
    torch.manual_seed(0)
    make, shape = NETS[case] if isinstance(case, str) else case
    x = shape if isinstance(shape, torch.Tensor) else torch.randn(shape).double()
    return linearizing(make().eval(), x if points is None else x[:points])


@pytest.mark.parametrize("name", NETS)
def test_jacobian_full_matrix_products_and_diagonal_are_those_of_the_loop(name):
    bnn, values, x, linearize = made(name)
    linear = linearize(x)
    rows = dense_jacobian(bnn, values, x, linear.blocks)
    torch.testing.assert_close(tyxe.curvature.jacobian(linear), rows, rtol=1e-9, atol=1e-10)
    back = linear.blocks.unflatten(linear.blocks.flatten(values))
    assert dict.fromkeys(values, True) == {s: torch.equal(back[s], values[s]) for s in back}
    rows = rows.flatten(0, 1)
    expected = rows.mT @ rows / 0.25
    full = curvature_of(bnn, linearize, x, "full").operator
    torch.testing.assert_close(full.to_dense(), expected, rtol=1e-9, atol=1e-10)
    targets = torch.zeros_like(linear.outputs)
    for batches in ([(x, targets)], [(x[:1], targets[:1]), (x[1:], targets[1:])]):
        given = bnn._run_frozen, values, bnn.likelihood, lambda batches=batches: batches
        products = CurvatureProducts(*given, blocks=linear.blocks)
        torch.testing.assert_close(dense_products(products), expected, rtol=1e-9, atol=1e-10)
    diagonal = curvature_of(bnn, linearize, x, "diag").operator
    torch.testing.assert_close(diagonal.diagonal(), expected.diagonal(), rtol=1e-9, atol=1e-10)


ONE_POSITION = ["mlp", "no bias", "normed"]


@pytest.mark.parametrize("name", ONE_POSITION)
def test_kronecker_blocks_of_one_point_are_exact(name):
    bnn, values, x, linearize = made(name, points=1)
    blocks = linearize(x).blocks
    assert any(isinstance(group, LinearBlock) for group in blocks)
    rows = dense_jacobian(bnn, values, x, blocks).flatten(0, 1)
    kron = curvature_of(bnn, linearize, x, "kron")
    start = 0
    for group, block in zip(blocks, kron.operator.blocks.values(), strict=True):
        part = rows[:, start : start + group.size]
        expected = part.mT @ part / 0.25
        if isinstance(group, SiteBlock):
            expected = expected.diagonal().diag()
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-8, atol=1e-9)
        start += group.size


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(2, 3, 2, padding=1),
        lambda: nn.Conv2d(4, 6, 2, groups=2),
        lambda: nn.ConvTranspose2d(4, 6, 2, groups=2),
    ],
)
def test_reduced_factors_of_one_point_are_exact_where_positions_meet_in_a_sum(layer):
    layer = layer()
    channels = layer.in_channels
    net = nn.Sequential(
        layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh(), nn.Linear(layer.out_channels, 3)
    )
    bnn, values, x, linearize = made((lambda: net, (1, channels, 4, 4)))
    blocks = linearize(x).blocks
    rows = dense_jacobian(bnn, values, x, blocks).flatten(0, 1)
    kron = curvature_of(bnn, linearize, x, "kron", reduce=True)
    block, group = kron.operator.blocks[blocks.blocks[0].name], blocks.blocks[0]
    expected = (rows[:, : group.size].mT @ rows[:, : group.size]) / 0.25
    if group.groups > 1:
        size = group.size // group.groups
        parts = [expected[i : i + size, i : i + size] for i in range(0, group.size, size)]
        expected = torch.block_diag(*parts)
    torch.testing.assert_close(block.to_dense(), expected, rtol=1e-8, atol=1e-9)


def test_expanded_factors_are_exact_for_a_linear_layer_over_positions():
    bnn, _, x, linearize = made((lambda: nn.Linear(3, 2), (4, 5, 3)))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5, event_dim=2)
    full = curvature_of(bnn, linearize, x, "full", likelihood).operator.to_dense()
    kron = curvature_of(bnn, linearize, x, "kron", likelihood).operator.to_dense()
    torch.testing.assert_close(kron, full, rtol=1e-9, atol=1e-9)


LIKELIHOODS = {
    "categorical": lambda n: (tyxe.likelihoods.Categorical(n), torch.zeros(n).long()),
    "bernoulli": lambda n: (tyxe.likelihoods.Bernoulli(n, event_dim=1), torch.zeros(n, 2).double()),
    "poisson": lambda n: (tyxe.likelihoods.Poisson(n, event_dim=1), torch.zeros(n, 2).double()),
    "heteroskedastic": lambda n: (
        tyxe.likelihoods.HeteroskedasticGaussian(n),
        torch.zeros(n, 1).double(),
    ),
}


@pytest.mark.parametrize("which", LIKELIHOODS)
def test_the_ggn_of_every_likelihood(which):
    bnn, values, x, linearize = made("mlp")
    likelihood, targets = LIKELIHOODS[which](len(x))
    blocks = linearize(x).blocks
    rows = dense_jacobian(bnn, values, x, blocks)
    hessian = tyxe.likelihoods.output_hessian(likelihood, linearize(x).outputs.detach())
    blocks = torch.stack([torch.block_diag(*one) for one in hessian])
    expected = (rows.mT @ blocks @ rows).sum(0)
    full = curvature_of(bnn, linearize, x, "full", likelihood, targets=targets)
    torch.testing.assert_close(full.operator.to_dense(), expected, rtol=1e-9, atol=1e-10)
    log_likelihood = likelihood.log_likelihood(linearize(x).outputs, targets, "sum")
    assert math.isclose(full.log_likelihood, float(log_likelihood.detach()), rel_tol=1e-12)


def test_the_empirical_fisher_is_that_of_the_labels():
    bnn, values, x, linearize = made("mlp")
    likelihood, targets = tyxe.likelihoods.Categorical(len(x)), torch.tensor([0, 1, 1, 0, 1])
    blocks = linearize(x).blocks
    rows = dense_jacobian(bnn, values, x, blocks)
    outputs = linearize(x).outputs.detach()
    residual = F.one_hot(targets, 2) - outputs.softmax(-1)
    scores = torch.einsum("nc,ncp->np", residual, rows)
    full = curvature_of(
        bnn, linearize, x, "full", likelihood, targets=targets, curvature="empirical"
    )
    torch.testing.assert_close(full.operator.to_dense(), scores.mT @ scores, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_batches_add_up_and_scale_to_the_data_set(structure):
    bnn, _, x, linearize = made("mlp")
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.5)
    targets = torch.zeros(5, 2).double()
    whole = tyxe.curvature.collect_curvature(linearize, likelihood, [(x, targets)], structure)
    parts = [(x[:2], targets[:2]), (x[2:], targets[2:])]
    split = tyxe.curvature.collect_curvature(linearize, likelihood, parts, structure)
    torch.testing.assert_close(
        split.operator.to_dense(), whole.operator.to_dense(), rtol=1e-8, atol=1e-9
    )
    half = curvature_of(bnn, linearize, x, structure).operator.to_dense()
    torch.testing.assert_close(whole.operator.to_dense(), 2 * half, rtol=1e-8, atol=1e-9)


# Of low rank with a diagonal of sites, or of single weights.
LOW_RANK = {"of sites": 2, "of weights": 30}


@pytest.mark.parametrize("structure", ["kron", "diag", "full", *LOW_RANK])
@pytest.mark.parametrize("name", NETS)
def test_functional_covariance_is_the_dense_product(name, structure):
    bnn, _, x, linearize = made(name)
    linear = linearize(x)
    if structure in LOW_RANK:
        one = low_rank_precision(linear.blocks, LOW_RANK[structure], structure)
        precision = BlockDiagonal({"all": one})
    else:
        precision = curvature_of(bnn, linearize, x, structure).operator.add_diagonal(0.7)
    rows = tyxe.curvature.jacobian(linear)
    outputs = linear.outputs
    classes = outputs.shape[-1]
    dense = rows @ torch.linalg.inv(precision.to_dense()) @ rows.mT
    blocks = dense.unflatten(1, (-1, classes)).unflatten(3, (-1, classes))
    expected = torch.diagonal(blocks, dim1=1, dim2=3).movedim(-1, 1)
    found = tyxe.curvature.functional_covariance(linear, precision)
    assert found.shape == (*outputs.shape, classes)
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-7, atol=1e-9)


def test_what_has_factors_and_what_has_not():
    kinds = {
        "lstm": {"net.head.weight"},
        "tied": {"net.hidden.weight"},
        "twice": {"net.layer.weight"},
        "normed": {"net.0.weight", "net.4.weight"},
        "attention": {
            "net.attention.in_proj_weight",
            "net.attention.out_proj.weight",
            "net.head.weight",
        },
    }
    for name, expected in kinds.items():
        _, _, x, linearize = made(name)
        found = {g.name for g in linearize(x).blocks if isinstance(g, LinearBlock)}
        assert found == expected, name
