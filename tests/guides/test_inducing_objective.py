"""The inducing-weights guide's objective: the KL of its parts, closed forms, scales."""

import math

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import tyxe
from tests.oracles.inducing import FAMILIES, SMALL, build, data, make, program
from tyxe.bnn import elbo_terms
from tyxe.distributions.inducing_formulas import conditional_divergence
from tyxe.guides import AutoInducing


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kl_is_that_of_the_parts(family):
    bnn = make(build(q_inducing=family, inducing_rows={"0.weight": 2, "2.weight": None}))
    x, y = data()
    terms = elbo_terms(bnn.model, bnn.guide, x, y)
    guide = bnn.net_guide
    expected = sum(q.kl_from_prior() for q in guide.joints())
    for name in ("net.2.weight", "net.2.bias"):
        q = guide.posterior()[name]
        prior = dict(bnn.net_prior.priors())[name.removeprefix("net.")]
        expected = expected + torch.distributions.kl_divergence(q, prior)
    torch.testing.assert_close(terms.kl, expected, rtol=1e-9, atol=1e-9)
    assert set(terms.values) >= {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


@pytest.mark.parametrize("hierarchical", [None, (2, 1)])
def test_without_closed_forms_it_is_pyros_trace_elbo(hierarchical):
    bnn = make(build(hierarchical=hierarchical))
    x, y = data()
    found = []
    for closed in (False, True):
        pyro.set_rng_seed(3)
        terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=closed)
        bnn.zero_grad()
        loss = terms.kl - terms.data
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in bnn.net_guide.parameters()]))
    pyro.set_rng_seed(3)
    bnn.zero_grad()
    loss = Trace_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    loss.backward()
    assert found[0][0] == pytest.approx(loss.item(), rel=1e-10)
    for gradient, parameter in zip(found[0][1], bnn.net_guide.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-9)
    assert found[1][0] != pytest.approx(found[0][0])
    # Pyro's closed forms know no joint posterior: it must agree with its own sampled KL.
    pyro.set_rng_seed(3)
    loss = TraceMeanField_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    assert math.isfinite(loss.item())


def test_scaling_sites_of_a_layer():
    bnn = make(build())
    x, y = data()
    plain = elbo_terms(bnn.model, bnn.guide, x, y).kl
    first = next(iter(bnn.net_guide.joints())).kl_from_prior()
    with tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight", "0.bias"]):
        scaled = elbo_terms(bnn.model, bnn.guide, x, y).kl
    torch.testing.assert_close(scaled, plain - first / 2, rtol=1e-9, atol=1e-9)
    with (
        tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight"]),
        pytest.raises(ValueError, match=r"prior of net.0.weight, net.0.bias is one, so their"),
    ):
        elbo_terms(bnn.model, bnn.guide, x, y)


def test_a_site_that_the_model_lacks():
    bnn = make(build())
    with pytest.raises(ValueError, match=r"the guide samples 'net.0.weight', which the model does"):
        elbo_terms(lambda: None, bnn.guide)


def test_the_function_space_form_weighs_the_conditional():
    bnn = make(build(inducing_rows={"0.weight": 2, "2.weight": None}, dataset_size=2))
    (q,) = bnn.net_guide.joints()
    divergence = conditional_divergence(q.conditional_scale, 9)
    expected = min(1.0, 2 / 3) * divergence + q.u.kl()
    torch.testing.assert_close(q.kl_from_prior(), expected)
    (q,) = AutoInducing(program(nn.Linear(2, 3)), **SMALL, dataset_size=100).joints()
    assert q.weight == 1.0


def test_max_lambda_zero_is_a_function_of_u():
    bnn = make(build(max_lambda=0.0, q_inducing="ensemble", ensemble_size=1))
    draws = [bnn.net_guide()["net.0.weight"] for _ in range(2)]
    assert torch.equal(*draws)
    assert bnn.net_guide.get_lambda("0.weight") == 0.0
    assert elbo_terms(bnn.model, bnn.guide, *data()).kl == 0.0
