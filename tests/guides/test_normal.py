"""Mean-field Normals: their parameters, caps of scales, densities on constrained sites."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from scipy import integrate

import tyxe
from tests.oracles.programs import program
from tyxe.bnn import elbo_terms
from tyxe.guides import AutoNormal, AutoRadial, init_to_constant, scale_below_prior
from tyxe.guides.normal import capped_log


def test_one_mean_and_scale_for_each_weight_in_either_spelling():
    guide = AutoNormal(program(), init_loc_fn=init_to_constant(constant=0.5), init_scale=0.2)
    for name in ("weight", "net.weight"):
        assert torch.equal(guide.get_loc(name), torch.full((2, 3), 0.5))
        torch.testing.assert_close(guide.get_scale(name), torch.full((2, 3), 0.2))
    with pytest.raises(ValueError, match="no site 'wieght'; expected one of weight, bias"):
        guide.get_loc("wieght")
    q = guide.posterior()["net.weight"]
    assert isinstance(q.base_dist, td.Normal)
    assert guide.parameter_kinds() == {
        "locs.weight": "loc",
        "locs.bias": "loc",
        "unconstrained_scales.weight": "scale",
        "unconstrained_scales.bias": "scale",
    }


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize(
    ("fixed", "trained"), [("train_loc", "unconstrained_scales"), ("train_scale", "locs")]
)
def test_what_is_not_trained_has_no_gradient(fixed, trained, cap):
    guide = AutoNormal(program(), max_guide_scale=cap, **{fixed: False})
    found = [name for name, p in guide.named_parameters() if p.requires_grad]
    assert found == [f"{trained}.weight", f"{trained}.bias"]


def test_the_cap_is_smooth_and_has_a_gradient_everywhere():
    cap, unconstrained = 0.3, torch.linspace(-30.0, 12.0, 200).double().requires_grad_()
    scales = capped_log(unconstrained, cap).exp()
    (gradient,) = torch.autograd.grad(scales.sum(), unconstrained)
    assert 0 < scales.min() < scales.max() <= cap
    assert bool((scales.diff() > 0).all())
    # What is left of the room, also just below the cap; far below, the scale is an exponential.
    torch.testing.assert_close(gradient, scales * (1 - scales / cap))
    assert gradient.min() > 0
    near, far = capped_log(torch.tensor([math.log(999.0), -20.0]).double(), cap).exp()
    assert near.item() == pytest.approx(0.999 * cap)
    assert far.item() == pytest.approx(cap * math.exp(-20.0))


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 0.1, 0.49])
def test_scales_start_where_they_are_told(cap, scale):
    guide = AutoNormal(program(nn.Linear(3, 2).double()), init_scale=scale, max_guide_scale=cap)
    assert guide.get_scale("weight").tolist() == [pytest.approx(3 * [scale], rel=1e-6)] * 2


@pytest.mark.parametrize(
    ("init_scale", "expected"),
    [
        (lambda site: 0.1 * site["infer"]["fans"][0] ** -0.5, 0.05),
        (scale_below_prior(), 2 * math.exp(-3)),
    ],
)
def test_scales_may_start_by_site(init_scale, expected):
    sites = program(nn.Linear(4, 2), dist.Normal(0.0, 2.0))
    guide = AutoNormal(sites, init_scale=init_scale)
    for name in ("weight", "bias"):
        torch.testing.assert_close(guide.get_scale(name).unique(), torch.tensor([expected]))


@pytest.mark.parametrize(
    "prior",
    [dist.LogNormal(0.0, 1.0), dist.Gamma(2.0, 1.0), dist.Beta(2.0, 2.0), dist.Pareto(0.1, 2.0)],
)
@pytest.mark.parametrize("guide", [AutoNormal, AutoRadial])
def test_constrained_posteriors_are_densities(guide, prior):
    guide = guide(program(nn.Linear(1, 1, bias=False).double(), prior), init_scale=0.4)
    q = guide.posterior()["net.weight"]

    def density(w):
        return q.log_prob(torch.full((1, 1), w, dtype=torch.float64)).exp().item()

    upper = 1.0 if isinstance(prior, td.Beta) else math.inf
    lower = 0.1 if isinstance(prior, td.Pareto) else 0.0
    mass, _ = integrate.quad(density, lower, upper, limit=200)
    assert mass == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("guide", [AutoNormal, pyro.infer.autoguide.AutoNormal])
@pytest.mark.parametrize("prior", [dist.LogNormal(0.0, 1.0), dist.Gamma(2.0, 1.0)])
def test_a_positive_posterior_becomes_a_prior(guide, prior):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(4, scale=prior)
    net, of_weights = nn.Linear(3, 2), tyxe.priors.IIDPrior(prior)
    bnn = tyxe.VariationalBNN(net, of_weights, likelihood, guide, AutoNormal)
    bnn.update_prior(tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    noise = bnn.likelihood_guide.get_detached_distributions()["scale"]
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(4, scale=noise)
    new = tyxe.VariationalBNN(net, bnn.prior, likelihood, AutoNormal, AutoNormal)
    x = torch.ones(4, 3)
    for each in (bnn, new):
        values = each.guide()
        assert min(value.min() for value in values.values()) > 0
        assert bool(elbo_terms(each.model, each.guide, x, torch.zeros(4, 2)).kl.isfinite())
    kl = elbo_terms(bnn.net_prior, bnn.net_guide).kl  # of the posterior from itself
    torch.testing.assert_close(kl, torch.zeros(()), atol=1e-5, rtol=0.0)


def test_constrained_sites_over_several_weights_have_the_jacobian_once_each():
    guide = AutoNormal(program(nn.Linear(3, 2).double(), dist.Gamma(2.0, 1.0)))
    q = guide.posterior()["net.weight"]
    value = q.sample()
    loc, scale = guide.get_loc("weight"), guide.get_scale("weight")
    expected = td.LogNormal(loc, scale).log_prob(value).sum()
    torch.testing.assert_close(q.log_prob(value), expected)
    assert q.event_shape == (2, 3)
    torch.testing.assert_close(guide.median()["net.weight"], loc.detach().exp())
