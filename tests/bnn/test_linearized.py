"""Predictions of linearised nets, for Laplace and for guides that are normal."""

import copy
import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
from pyro.infer import autoguide

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.laplace import ADAM, classifier, fitted
from tyxe.bnn.passes import ReplayedDraws
from tyxe.bnn.variational import glm_outputs
from tyxe.curvature import jacobian
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.linalg import Dense

pytestmark = pytest.mark.usefixtures("double")


def test_a_guide_in_half_precision_is_linearised_in_single():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).bfloat16()
    noise = tyxe.likelihoods.HomoskedasticGaussian(8, scale=0.1)
    half = tyxe.VariationalBNN(net, NORMAL, noise, tyxe.guides.AutoNormal)
    whole = copy.deepcopy(half).float()
    x = torch.randn(8, 2).bfloat16()
    mean, scale = half.predict(x, predictive="glm")
    expected = whole.predict(x.float(), predictive="glm")
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(mean.float(), expected[0], rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(scale.float(), expected[1], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("kind", ["classes", "binary", "scales", "censored"])
def test_bounded_outputs_have_no_gaussian_in_any_prediction(kind):
    x, likelihoods = torch.randn(8, 2), tyxe.likelihoods
    scales = likelihoods.HeteroskedasticGaussian(8, positive_scale=True)
    binary = likelihoods.Bernoulli(8, logit_predictions=False)
    likelihood, end, y = {
        "classes": (
            likelihoods.Categorical(8, logit_predictions=False),
            nn.Softmax(-1),
            torch.arange(8) % 2,
        ),
        "binary": (binary, nn.Sigmoid(), torch.ones(8, 2)),
        "scales": (scales, nn.Softplus(), torch.ones(8, 1)),
        "censored": (likelihoods.Censored(scales), nn.Softplus(), torch.ones(8, 1, 2)),
    }[kind]
    net = nn.Sequential(nn.Linear(2, 2), end)
    options = {"structure": "full", "curvature": "empirical"}
    bnn = tyxe.LaplaceBNN(net, NORMAL, likelihood, **options)
    bnn.fit_curvature([(x, y)])
    for predicts in (
        lambda: bnn.predict(x),
        lambda: bnn.predict(x, aggregate=False, joint=True),
        lambda: bnn.sample_predictive(x),
        lambda: bnn.ood_score(x),
        lambda: bnn.refine([(x, y)]),
    ):
        with pytest.raises(ValueError, match="let the net return real numbers"):
            predicts()
    torch.testing.assert_close(bnn.predict(x, num_predictions=0), net(x))


def small(guide):
    """A regression whose posterior is not at its start."""
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, guide)
    bnn.fit([(x, x[:, :2])], ADAM, 5)
    return bnn, x


class AutoDense(tyxe.guides.Guide):
    """One Normal over all sites with a known precision."""

    def __init__(self, module):
        super().__init__(module)
        self.blocks = ParamBlocks.of_sites({s.name: s.shape for s in reversed(self.sites)})
        rows = torch.randn(2 * self.blocks.size, self.blocks.size)
        self.precision = Dense(rows.mT @ rows)
        self.loc = nn.Parameter(torch.randn(self.blocks.size))

    def joints(self):
        return (Gaussian(self.blocks, self.loc, self.precision),)

    def site_distribution(self, site):
        raise AssertionError("all sites are of the joint")


def of_sites(guide, blocks):
    """Return the covariance of independent Normals."""
    scales = {f"net.{site.own_name}": guide.get_scale(site.own_name) for site in guide.sites}
    return blocks.flatten(scales).square().diag()


def of_ones_own(guide, blocks):
    order = blocks.flatten(guide.blocks.unflatten(torch.arange(len(guide.loc))))
    return torch.linalg.inv(guide.precision.to_dense())[order][:, order]


def of_pyros(guide, blocks):
    posterior = guide.guide.get_posterior()
    covariance = getattr(posterior, "covariance_matrix", None)
    if covariance is None:  # of an Independent
        covariance = posterior.variance.diag()
    places = torch.arange(len(covariance), dtype=covariance.dtype)
    unpacked = {site["name"]: part for site, part in guide.guide._unpack_latent(places)}
    order = blocks.flatten(unpacked).long()
    return covariance[order][:, order]


LOW_RANK = functools.partial(autoguide.AutoLowRankMultivariateNormal, rank=2)
NORMALS = {
    "mean field": (tyxe.guides.AutoNormal, of_sites),
    "one's own": (AutoDense, of_ones_own),
    "diagonal": (autoguide.AutoDiagonalNormal, of_pyros),
    "low rank": (LOW_RANK, of_pyros),
    "full": (autoguide.AutoMultivariateNormal, of_pyros),
}


@pytest.mark.parametrize("name", NORMALS)
def test_the_linearised_predictive_of_a_normal_has_its_covariance(name):
    kind, of = NORMALS[name]
    bnn, x = small(kind)
    linear = bnn._linearize(x)
    rows = jacobian(linear)
    _, found = glm_outputs(bnn.net_guide, linear)
    expected = rows @ of(bnn.net_guide, linear.blocks) @ rows.mT
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    mean, scale = bnn.predict(x, predictive="glm")
    torch.testing.assert_close(scale, (found.diagonal(dim1=1, dim2=2) + 0.25).sqrt())
    torch.testing.assert_close(mean, bnn.predict(x, num_predictions=0)[0])


JOINT = {
    "kron": lambda: fitted("kron")[:2],
    "full": lambda: fitted("full")[:2],
    "mean field": lambda: small(tyxe.guides.AutoNormal),
    "Pyro's, low rank": lambda: small(LOW_RANK),
}


@pytest.mark.parametrize("name", JOINT)
def test_joint_draws_are_the_linearised_net_at_draws_of_the_weights(name):
    """At all points and for any batches the same draws, with their covariance over points."""
    bnn, x = JOINT[name]()
    linear, count = bnn._linearize(x), 20
    how = {"num_predictions": count, "predictive": "glm", "joint": True}
    seeded = torch.Generator().manual_seed(1).get_state()
    torch.set_rng_state(seeded)
    weights = torch.stack(
        [linear.blocks.flatten(v).detach() for v in ReplayedDraws().over(bnn._draws(count))]
    )
    moved = weights - linear.blocks.flatten(bnn._mean_values()).detach()
    expected = linear.outputs.detach() + torch.einsum("ncp,sp->snc", jacobian(linear), moved)
    for size in (None, 2):
        torch.set_rng_state(seeded)
        found = bnn.predict(x, aggregate=False, batch_size=size, **how)
        torch.testing.assert_close(found, expected)


def test_joint_targets_have_the_law_of_sums_over_points():
    bnn, x = small(tyxe.guides.AutoNormal)
    how = {"predictive": "glm", "joint": True}
    outputs = bnn.predict(x, num_predictions=2_000, aggregate=False, **how)
    drawn = bnn.sample_predictive(x, num_samples=2_000, **how)
    expected = outputs.sum((1, 2)).var() + 0.25 * drawn[0].numel()
    assert abs(drawn.sum((1, 2)).var() / expected - 1) < 6 * math.sqrt(2 * 2 / 2_000)


def test_joint_draws_are_of_weights():
    bnn, x, y = fitted("full")
    bnn.fit_gp([(x, y)])
    for predictive in ("gp", bnn._gaussian_predictives()["glm"]):
        with pytest.raises(ValueError, match="outputs of each point alone"):
            bnn.predict(x, predictive=predictive, aggregate=False, joint=True)
    drawn = bnn.predict(x, predictive="bnn", num_predictions=3, aggregate=False, joint=True)
    assert drawn.shape[0] == 3


def chain(prior, likelihood):
    kernel = functools.partial(pyro.infer.mcmc.HMC, step_size=0.1, num_steps=2)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1), prior, likelihood, kernel)
    bnn.fit([(torch.ones(4, 1), torch.ones(4, 1))], 2, warmup_steps=1, disable_progbar=True)
    return bnn


def of_guide(guide):
    return lambda *parts: tyxe.VariationalBNN(nn.Linear(1, 1), *parts, guide)


POSITIVE = tyxe.priors.IIDPrior(dist.LogNormal(0.0, 1.0))
NO_GAUSSIAN = [
    (chain, NORMAL, "MCMC_BNN has no Gaussian posterior"),
    (of_guide(tyxe.guides.AutoRadial), NORMAL, "'net.weight' is no Normal"),
    (of_guide(autoguide.AutoDiagonalNormal), POSITIVE, "is no Normal|no distribution per site"),
    (of_guide(autoguide.AutoMultivariateNormal), POSITIVE, "is no Normal|no distribution per site"),
]


@pytest.mark.parametrize(("make", "prior", "message"), NO_GAUSSIAN)
def test_a_linearised_net_needs_a_gaussian(make, prior, message):
    bnn = make(prior, tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5))
    for how in ({}, {"aggregate": False, "joint": True}):
        with pytest.raises(TypeError, match=message):
            bnn.predict(torch.ones(4, 1), predictive="glm", **how)


@pytest.mark.parametrize("used", [True, False])
def test_the_subset_of_gp_moves_with_the_net(used):
    bnn, x, y = classifier("full")
    single = copy.deepcopy(bnn).float()
    x32 = x.float()
    single.fit_curvature([(x32, y)])
    single.fit_gp([(x32, y)])
    if used:
        single.predict(x32, predictive="gp", link="probit")
    single.to(torch.float64)
    found = single.predict(x32.double(), predictive="gp", link="probit")
    assert found.dtype == torch.float64
    # The same net and the same data, rounded to float32, in float64 from the start.
    exact, _, _ = classifier("full")
    means = {n: p for n, p in single.state_dict().items() if n.startswith("net_guide.locs")}
    exact.load_state_dict({**exact.state_dict(), **means})
    exact.fit_curvature([(x32.double(), y)])
    torch.testing.assert_close(
        found, exact.predict(x32.double(), link="probit"), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("link", ["mc", "probit"])
def test_certain_predictions_have_finite_scores(link):
    torch.manual_seed(0)
    x = torch.randn(8, 3).float()
    net = nn.Linear(3, 1).float()
    with torch.no_grad():
        net.weight.mul_(60)
    y = (net(x) > 0).float()
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1e-3))
    likelihood = tyxe.likelihoods.Bernoulli(8, event_dim=1)
    bnn = tyxe.LaplaceBNN(net, prior, likelihood)
    bnn.fit_curvature([(x, y)])
    assert bnn.predict(x, link=link).isfinite().all()
    assert bnn.evaluate(x, y, link=link)[1].isfinite()


@pytest.mark.parametrize("predictive", ["glm", "gp", "bnn", None])
def test_no_predictions_is_the_centre(predictive):
    """Which needs no curvature, and nothing that is random."""
    bnn, x, y = classifier()
    logits = bnn.to_module()(x).detach()
    expected = logits.log_softmax(-1)
    for _ in range(2):
        found = bnn.predict(x, num_predictions=0, aggregate=False, predictive=predictive)
        torch.testing.assert_close(found, logits[None])
        found = bnn.predict(x, num_predictions=0, predictive=predictive)
        torch.testing.assert_close(found.log_softmax(-1), expected)
        _, log_likelihood = bnn.evaluate(x, y, 0, reduction="none", predictive=predictive)
        torch.testing.assert_close(log_likelihood, expected.gather(1, y[:, None])[:, 0])
        bnn.fit_curvature([(x, y)])
        bnn.fit_gp([(x, y)])


def test_no_predictions_of_a_refined_posterior_is_its_centre():
    bnn, x, y = fitted("full")
    refined = bnn.refine([(x, y)])
    mean = refined.outputs(x)[0]
    found = refined.predict(x, num_predictions=0)
    torch.testing.assert_close(found.log_softmax(-1), mean.log_softmax(-1).to(found))
