"""Laplace approximations in float64, and nets that hold their points in any order."""

import pyro.distributions as dist
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.laplace import laplace_bnn
from tyxe.curvature import Linearization, collect_curvature


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
            grads = torch.autograd.grad(output, list(at.values()), retain_graph=True)
            each.append(blocks.flatten(dict(zip(at, grads, strict=True))))
        rows.append(torch.stack(each))
    return torch.stack(rows)


def curvature_of(bnn, linearize, x, structure, likelihood=None, **options):
    likelihood = bnn.likelihood if likelihood is None else likelihood
    with torch.no_grad():
        shape = linearize(x).outputs.shape
    targets = options.pop("targets", torch.zeros(shape).double())
    return collect_curvature(linearize, likelihood, [(x, targets)], structure, **options)


class Through(nn.Module):
    """A map of positions within another order than points first, then one of what they sum to."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(3, 4), nn.Linear(4, 2)
        self.conv = nn.Conv1d(3, 4, 1) if "convolution" in kind else None
        self.encoder = nn.TransformerEncoderLayer(3, 1, 5, 0.0) if kind == "encoder" else None
        self.lstm = nn.LSTM(3, 3) if kind == "recurrent" else None

    def forward(self, x):
        n, steps, _ = x.shape
        if self.kind == "second":
            h = self.inner(x.transpose(0, 1)).tanh()[-1]
        elif self.kind == "first step":
            h = self.inner(x.transpose(0, 1)).tanh()[0]
        elif self.kind == "third":
            h = self.inner(x.transpose(0, 1)[None]).tanh().sum((0, 1))
        elif self.kind == "folded":
            h = self.inner(x.transpose(0, 1).reshape(-1, 3)).tanh().view(steps, n, 4).sum(0)
        elif self.kind == "folded, points first":
            h = self.inner(x.reshape(-1, 3)).tanh().view(n, steps, 4).sum(1)
        elif self.kind == "folded convolution":
            h = self.conv(x.reshape(-1, 3, 1)).tanh().view(n, steps, 4).sum(1)
        elif self.kind == "encoder":
            h = self.inner(self.encoder(x.transpose(0, 1))).tanh()[0]
        else:
            h = self.inner(self.lstm(x.transpose(0, 1))[0]).tanh().sum(0)
        return self.outer(h)
