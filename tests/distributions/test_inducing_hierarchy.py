"""Inducing weights of inducing weights, against the dense Gaussian."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import Size

from tests.oracles.inducing_gaussians import (
    FAMILIES,
    LAYER,
    SCALES,
    close,
    make_maps,
    make_u,
    mixture_log_prob,
    priors,
)
from tyxe.distributions import IndependentSites, InducingWeights
from tyxe.distributions.inducing import HierarchicalInducing, LayerPrior, StackedU
from tyxe.distributions.inducing_formulas import conditional_divergence, inducing_side
from tyxe.distributions.param_blocks import LinearBlock


def make_hierarchy(family="diagonal"):
    """Two layers, 3 x 4 with U 2 x 2 and 2 x 3 with U 1 x 2, under one 2 x 1 matrix."""
    rows, columns = (inducing_side(*side) for side in make_maps(2, 1, 3, 2))
    scale = torch.tensor(0.8).double()
    top = LayerPrior(LinearBlock("stack", None, Size([3, 2])), (1.0,))
    stack = InducingWeights(make_u(family, 2, 1), rows, columns, scale, top)
    layers = []
    second = LayerPrior(LinearBlock("net.last", None, Size([2, 3])), (1.0,))
    for layer, first, last in ((LAYER, 0, 2), (second, 2, 3)):
        rows, columns = (inducing_side(*s) for s in make_maps(last - first, 2, *layer.shape))
        u = StackedU(stack, first, last)
        layers.append(InducingWeights(u, rows, columns, torch.tensor(0.6).double(), layer))
    return HierarchicalInducing(layers, stack)


def dense_hierarchy(q):
    means, covariance = q.stack.u.components()
    b = torch.kron(q.stack.row_basis, q.stack.column_basis.contiguous())
    identity = torch.eye(len(b)).double()
    means = means @ b.mT
    covariance = q.stack.conditional_scale**2 * (identity - b @ b.mT) + b @ covariance @ b.mT
    maps = [torch.kron(p.row_basis, p.column_basis.contiguous()) for p in q.layers]
    gains, scales = torch.block_diag(*maps), torch.cat([SCALES, torch.ones(6).double()])
    conditionals = torch.block_diag(
        *(
            p.conditional_scale**2 * (torch.eye(len(m)).double() - m @ m.mT)
            for p, m in zip(q.layers, maps, strict=True)
        )
    )
    total = conditionals + gains @ covariance @ gains.mT
    return means @ gains.mT * scales, scales[:, None] * total * scales


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hierarchy_against_the_dense_gaussian(family):
    q = make_hierarchy(family)
    means, covariance = dense_hierarchy(q)
    value = q.sample()
    close(q.log_prob(value), mixture_log_prob(means, covariance, value))
    close(q.mean, means.mean(0))
    variance = covariance.diagonal() + means.var(0, correction=0)
    close(q.variance, variance)
    assert q.names == ("net.weight", "net.bias", "net.last")
    close(q.flatten(q.unflatten(value)), value)
    assert q.layers[1].sample((5,)).shape == (5, 2, 3)
    index = torch.arange(18)
    for name, part in q.unflatten(value).items():
        own = q.unflatten(index)[name].reshape(-1)
        expected = mixture_log_prob(means[:, own], covariance[own][:, own], part.reshape(-1))
        close(q.marginal(name).log_prob(part), expected)
        close(q.marginal(name).variance.reshape(-1), variance[own])


def test_samples_and_divergence_of_the_hierarchy():
    q, count = make_hierarchy(), 60000
    samples = q.sample((count,))
    (mean,), covariance = dense_hierarchy(q)
    centred = samples - mean
    products = centred[:, :, None] * centred[:, None, :]
    error = products.std(0) / math.sqrt(count)
    assert bool(((products.mean(0) - covariance).abs() < 6 * error).all())
    assert bool((centred.mean(0).abs() < 6 * (covariance.diagonal() / count).sqrt()).all())
    (loc,), spread = q.stack.u.components()
    expected = td.kl_divergence(
        td.MultivariateNormal(loc, spread),
        td.MultivariateNormal(torch.zeros_like(loc), torch.eye(2).double()),
    )
    for part, size in ((q.stack, 6), (q.layers[0], 12), (q.layers[1], 6)):
        expected = expected + conditional_divergence(part.conditional_scale, size)
    one = torch.ones((), dtype=torch.float64)
    last = {"net.last": dist.Normal(0 * one, one).expand([2, 3]).to_event(2)}
    close(td.kl_divergence(q, IndependentSites(priors() | last)), expected)
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, IndependentSites(priors(bias=3.0) | last))
    with pytest.raises(NotImplementedError, match="one KL together"):
        td.kl_divergence(q.layers[0], IndependentSites(priors()))
