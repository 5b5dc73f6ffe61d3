"""Laplace approximations in float64, and nets that hold their points in any order."""

import pyro.distributions as dist
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.laplace import laplace_bnn
from tests.oracles.nets import NetOf
from tyxe.curvature import Linearization, collect_curvature
from tyxe.linalg import LowRank


def laplace(net, structure="full", likelihood=None, points=5, **options):
    likelihood = tyxe.likelihoods.Categorical(points) if likelihood is None else likelihood
    prior = tyxe.priors.IIDPrior(
        dist.Normal(torch.zeros(()).double(), torch.ones(()).double()),
        **options.pop("rules", {}),
    )
    return laplace_bnn(net.double(), prior, likelihood, structure=structure, **options)


def jacobian_of(net, x, names):
    values = {name: p.detach() for name, p in net.named_parameters() if name in names}

    def outputs(values):
        return torch.func.functional_call(net, values, (x,))

    found = torch.func.jacrev(outputs)(values)
    return torch.cat([found[name].reshape(*found[name].shape[:2], -1) for name in names], 2)


def linearizing(net, x, values=None):
    """A BNN over a net, its values, inputs, and how to linearise it there."""
    with torch.no_grad():
        net.double()(x)
    bnn = mean_field(net, tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5)).eval()
    values = values or {f"net.{n}": p.detach().clone() for n, p in net.named_parameters()}
    shapes = {name: value.shape for name, value in values.items()}

    def linearize(inputs):
        return Linearization(bnn._run_frozen, values, inputs, shapes)

    return bnn, values, x, linearize


def dense_jacobian(bnn, values, x, blocks):
    """`(n, outputs, P)`, by a loop over points and outputs."""
    rows = []
    for n in range(len(x)):
        at = {name: value.clone().requires_grad_() for name, value in values.items()}
        outputs = bnn._run_net(at, x[n : n + 1]).flatten()
        each = []
        for output in outputs:
            how = {"retain_graph": True, "materialize_grads": True}
            grads = torch.autograd.grad(output, list(at.values()), **how)
            each.append(blocks.flatten(dict(zip(at, grads, strict=True))))
        rows.append(torch.stack(each))
    return torch.stack(rows)


def curvature_of(bnn, linearize, x, structure, likelihood=None, **options):
    likelihood = bnn.likelihood if likelihood is None else likelihood
    with torch.no_grad():
        shape = linearize(x).outputs.shape
    targets = options.pop("targets", torch.zeros(shape).double())
    return collect_curvature(linearize, likelihood, [(x, targets)], structure, **options)


def dense_products(products):
    like = next(iter(products.values.values()))
    return products @ torch.eye(products.blocks.size).to(like)


def low_rank_precision(blocks, rank, kind, scale=1.0):
    """A random one, whose diagonal is of sites or of single weights."""
    torch.manual_seed(1)
    entries = torch.rand(blocks.size).double() + 0.5
    if kind == "of sites":
        entries = blocks.flatten({site: torch.rand(()).double() + 0.5 for site in blocks.sites})
    return LowRank(entries, scale * torch.randn(rank, blocks.size).double().mT)


# What nets make of positions by maps that hold the points in another order than first, or flat.
HIDDEN = {
    "second": lambda net, x: net.inner(x.transpose(0, 1)).tanh()[-1],
    "first step": lambda net, x: net.inner(x.transpose(0, 1)).tanh()[0],
    "third": lambda net, x: net.inner(x.transpose(0, 1)[None]).tanh().sum((0, 1)),
    "folded": lambda net, x: (
        net.inner(x.transpose(0, 1).reshape(-1, 3)).tanh().view(-1, len(x), 4).sum(0)
    ),
    "folded, points first": lambda net, x: (
        net.inner(x.reshape(-1, 3)).tanh().view(*x.shape[:2], 4).sum(1)
    ),
    "folded convolution": lambda net, x: (
        net.conv(x.reshape(-1, 3, 1)).tanh().view(*x.shape[:2], 4).sum(1)
    ),
    "encoder": lambda net, x: net.inner(net.encoder(x.transpose(0, 1))).tanh()[0],
    "recurrent": lambda net, x: net.inner(net.lstm(x.transpose(0, 1))[0]).tanh().sum(0),
}


def through(kind):
    """A net with one of these inside, and a map of what they make."""
    parts = {
        "folded convolution": {"conv": nn.Conv1d(3, 4, 1)},
        "encoder": {"encoder": nn.TransformerEncoderLayer(3, 1, 5, 0.0)},
        "recurrent": {"lstm": nn.LSTM(3, 3)},
    }.get(kind, {})
    ends = {"inner": nn.Linear(3, 4), "outer": nn.Linear(4, 2)}
    return NetOf(lambda net, x: net.outer(HIDDEN[kind](net, x)), **ends, **parts)
