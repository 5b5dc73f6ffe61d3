"""experiments/inducing_images.py, inducing weights of two_clusters.py, and their parts."""

import math
from functools import partial

import inducing_images
import pytest
import torch
import two_clusters

import tyxe
from tyxe.testing import check_guide


def small_mean_field(net):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.1)
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    return tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal), prior


def test_what_is_drawn_makes_the_deviation_in_the_middle():
    """Of biases of the last layer alone it is their own, whatever the input."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    bnn, _ = small_mean_field(net)
    with torch.no_grad():
        bnn.net_guide.locs["2.weight"].copy_(torch.tensor([[1.0, -1.0, 1.0, 0.0, 0.0, 0.0]]))
    found = two_clusters.where_it_is(bnn, draws=4_000)
    own = bnn.net_guide.site_distribution(bnn.net_guide.sites[-1])
    parts = found["sd in the middle by what is drawn"]
    # the relative error of a deviation of n draws is 1 / sqrt(2 n); four of them
    assert parts["2.bias"] == pytest.approx(own.stddev.item(), rel=4 / 8_000**0.5)
    assert found["units in use"] == 3


def test_biases_that_are_fixed_keep_their_deviations():
    data = torch.randn(7, 1), torch.randn(7, 1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    s = two_clusters.inducing_toy.at("smoke")
    for name in (two_clusters.HELD, "FFG-W"):
        bnn, prior = small_mean_field(net)
        sites = {site.name.removeprefix("net."): site for site in bnn.net_guide.sites}
        before = {n: bnn.net_guide.site_distribution(q).stddev.clone() for n, q in sites.items()}
        two_clusters.fit_elbo(s, name, bnn, prior, net, data)
        after = {n: bnn.net_guide.site_distribution(q).stddev for n, q in sites.items()}
        assert torch.equal(before["0.bias"], after["0.bias"]) == (name != "FFG-W")
        assert not torch.equal(before["0.weight"], after["0.weight"])


def test_an_ensemble_of_one_step_starts_at_its_own_nets():
    """Its members differ, and the mean and the deviation are those of their outputs and noise."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    _, prior = small_mean_field(net)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.1)
    s, zeros = two_clusters.inducing_toy.at(steps=1, rate=1e-12), torch.zeros(7, 1)
    torch.manual_seed(1)
    how = s, prior.sites(net), likelihood, (zeros, zeros)
    facts, (mean, sd) = two_clusters.ensemble(*how, members=4)
    torch.manual_seed(1)
    nets = [two_clusters.common.mlp(1, 50, 1, act=torch.nn.Tanh) for _ in range(4)]
    with torch.no_grad():
        outputs = torch.stack([one(torch.linspace(-2, 2, 201)[:, None]) for one in nets])
    torch.testing.assert_close(mean, outputs.mean(0), atol=1e-5, rtol=1e-4)
    spread = outputs.var(0, unbiased=False) + 0.01
    torch.testing.assert_close(sd, spread.sqrt(), atol=1e-4, rtol=1e-3)
    assert math.isfinite(facts["log-likelihood"])


INDUCING = {"inducing_rows": {"0.weight": 3, "2.weight": 1}}
INDUCING |= {"inducing_cols": {"0.weight": 2, "2.weight": 3}}


@pytest.mark.parametrize("name", ["FCG-W", "FFG-W", "FFG-U"])
def test_elbo_of_many_draws_is_the_mean_of_that_of_one(name: str):
    builders = {
        "FCG-W": partial(two_clusters.AutoFullByLayer, init_scale=0.3),
        "FFG-W": tyxe.guides.AutoNormal,
        "FFG-U": partial(tyxe.guides.AutoInducing, **INDUCING),
    }
    net = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    priors = prior.sites(net.double())
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.5)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, builders[name])
    x, y = torch.randn(7, 1).double(), torch.randn(7, 1).double()
    if name == "FCG-W":
        for factor in bnn.net_guide.scale_factors.parameters():
            torch.nn.init.normal_(factor)
    data, kl = two_clusters.Elbo(bnn, priors, x, y, draws=4_000)()
    with torch.no_grad():
        single = [tyxe.bnn.elbo_terms(bnn.model, bnn.guide, x, y) for _ in range(200)]
    # the prior's standard deviation is a float32 number in one of them
    torch.testing.assert_close(kl, single[0].kl, rtol=1e-6, atol=0)
    each = torch.stack([terms.data for terms in single])
    # four standard errors, of the mean of 200 draws and of that of 4,000
    error = each.std() * math.sqrt(1 / 200 + 1 / 4_000)
    assert abs(data - each.mean()) < 4 * error


def test_full_by_layer_is_a_guide_of_the_covariance_of_its_factor():
    check_guide(two_clusters.AutoFullByLayer)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2).double())
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.5)
    guide = tyxe.VariationalBNN(net, prior, likelihood, two_clusters.AutoFullByLayer).net_guide
    for factor in guide.scale_factors.parameters():
        torch.nn.init.normal_(factor)
    (joint,) = guide.joints()
    unit = guide.scale_factors["0"].tril(-1) + torch.eye(8)
    root = guide.log_scales["0"].exp()[:, None] * unit
    torch.testing.assert_close(joint.variance, (root @ root.mT).diagonal())
    own = torch.distributions.MultivariateNormal(guide.locs["0"], scale_tril=root)
    value = own.sample((5,))
    torch.testing.assert_close(joint.log_prob(value), own.log_prob(value))


# --- corrupted images ---------------------------------------------------------------------------


def test_what_changes_of_images_keep():
    x, constant = torch.rand(2, 3, 12, 12), torch.full((1, 3, 12, 12), 0.3)
    torch.testing.assert_close(inducing_images.blurred(constant, 1.6), constant)
    contrast = inducing_images.flattened(x, 0.4).mean((-1, -2))
    torch.testing.assert_close(contrast, x.mean((-1, -2)))
    found = inducing_images.pixelated(x, 0.5)
    mean = x[0, 0, :2, :2].mean().expand(2, 2)
    torch.testing.assert_close(found[0, 0, :2, :2], mean)


def test_cosines_of_blocks():
    x = torch.rand(2, 3, 20, 28)
    # the basis is orthogonal: without rounding the image comes back
    torch.testing.assert_close(inducing_images.rounded_cosines(x, 1e-6), x, atol=1e-5, rtol=0)
    # a constant block has one coefficient, 8 times its value: a multiple of its step stays
    flat = torch.full((1, 1, 8, 8), 0.5)
    torch.testing.assert_close(inducing_images.rounded_cosines(flat, 0.4), flat)
    nearest = inducing_images.rounded_cosines(flat, 3.0)
    torch.testing.assert_close(nearest, torch.full_like(flat, 3 / 8))
