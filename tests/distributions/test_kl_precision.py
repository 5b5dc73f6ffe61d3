"""Sums over millions of weights in float32: the KL keeps its digits."""

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import nn

import tyxe
from tyxe.distributions.normal import FactorizedNormal
from tyxe.distributions.normal_kl import log_density
from tyxe.poutine.second_order import Expansion, minus_half_of_squares

RELATIVE = 1e-6  # of the terms that the sum is made of


def normals(size: int) -> tuple[FactorizedNormal, dist.Independent]:
    loc = 1 + 0.1 * torch.randn(size)
    q = FactorizedNormal(loc, torch.full((size,), -1.0))
    return q, dist.Normal(torch.zeros(()), torch.ones(())).expand((size,)).to_event(1)


@pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 9 * 513, 802_816, 10_000_000])
def test_the_kl_of_many_weights_is_that_of_double_precision(size: int) -> None:
    q, p = normals(size)
    exact = 0.5 * (q.loc.double().square() + q.log_scale.double().mul(2).exp() - 1) + 1.0
    terms = 0.5 * (q.loc.double().square() + 1).sum() + size
    error = abs(float(td.kl_divergence(q, p)) - float(exact.sum()))
    assert error <= RELATIVE * float(terms)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_guide_that_is_its_prior_has_no_kl(threads: int) -> None:
    net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    bnn = tyxe.VariationalBNN(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.Categorical(8),
        lambda model: tyxe.guides.AutoNormal(
            model, init_loc_fn=tyxe.guides.init_to_zero, init_scale=1.0
        ),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        terms = tyxe.bnn.elbo_terms(
            bnn.model, bnn.guide, torch.zeros(8, 784), torch.zeros(8, dtype=torch.long)
        )
    finally:
        torch.set_num_threads(before)
    count = sum(p.numel() for p in net.parameters())
    assert abs(terms.kl.item()) <= RELATIVE * count


def test_the_density_at_a_draw_of_many_weights() -> None:
    q, p = normals(4_000_000)
    exact = p.log_prob(q.loc.double())
    assert float(log_density(p, q.loc)) == pytest.approx(float(exact), rel=RELATIVE)


def test_weighted_squares_of_many_gradients() -> None:
    weights, values = torch.rand(4_000_000), 1 + torch.rand(4_000_000)
    exact = (weights.double() * values.double().square()).sum()
    (found,) = minus_half_of_squares([values], [Expansion("weight", values, weights)])
    assert float(found) == pytest.approx(-0.5 * float(exact), rel=RELATIVE)
