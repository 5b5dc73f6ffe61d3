"""Priors over several sites at once: programs, potentials, closed forms, bad input."""

import copy
import functools
import pickle

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn as nn
from pyro.infer import Trace_ELBO
from pyro.infer.mcmc import NUTS
from pyro.infer.mcmc.util import initialize_model

import tyxe
from tests.oracles import joints
from tests.oracles.bnns import mean_field, mlp
from tyxe.bnn.elbo import elbo_terms
from tyxe.bnn.potential import Potential
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.distributions.joint import JointSite
from tyxe.distributions.param_blocks import SiteBlock
from tyxe.linalg import Diagonal
from tyxe.priors import DictPrior
from tyxe.priors.sites import SitePriors
from tyxe.testing import GUIDES

pytestmark = pytest.mark.usefixtures("double")
LIKELIHOOD = tyxe.likelihoods.HomoskedasticGaussian(5, scale=joints.NOISE)


def data():
    return torch.randn(5, 2), torch.randn(5, 1)


def with_joint(guide="AutoNormal"):
    """Return a BNN of a small net whose prior is one Normal over all sites."""
    net = joints.small_net()
    bnn = joints.vcl(GUIDES[guide], net)
    bnn.update_prior(joints.joint_prior(net)[1])
    return bnn


def kl_of(bnn, **options):
    return elbo_terms(bnn.net_prior, bnn.net_guide, **options).kl


def test_the_program_samples_sites_one_by_one_from_one_draw():
    net = joints.small_net()
    joint, prior = joints.joint_prior(net)
    program = SitePriors(prior.sites(net), net)
    trace = poutine.trace(program).get_trace()
    values = {name: trace.nodes[name]["value"] for name in joint.names}
    assert all(isinstance(trace.nodes[name]["fn"], JointSite) for name in joint.names)
    torch.testing.assert_close(
        trace.log_prob_sum(), joint.log_prob(joint.flatten(values)), **joints.EXACT
    )
    # Conditioning and replay put other values in: the density is that of those.
    other = joint.unflatten(torch.randn(joint.event_shape))
    conditioned = poutine.trace(poutine.condition(program, other)).get_trace()
    expected = joint.log_prob(joint.flatten(other))
    torch.testing.assert_close(conditioned.log_prob_sum(), expected, **joints.EXACT)
    draws = torch.stack([joint.flatten(program()) for _ in range(4000)])
    covariance = torch.linalg.inv(joint.precision.to_dense())
    error = torch.cov(draws.T) - covariance
    limit = 6 * covariance.diagonal().max() / 4000**0.5
    assert error.abs().max() < limit
    pickle.loads(pickle.dumps(trace.nodes["net.0.bias"]["fn"]))


@pytest.mark.parametrize(
    "guide", ["AutoNormal", "AutoRadial", "pyro AutoNormal", "pyro AutoMultivariateNormal"]
)
def test_the_elbo_without_closed_forms_is_pyros(guide):
    bnn = with_joint(guide)
    x, y = data()
    torch.manual_seed(3)
    terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=False)
    torch.manual_seed(3)
    expected = Trace_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(terms.kl - terms.data, expected, **joints.EXACT)


def test_a_posterior_per_layer_with_a_prior_over_all_layers():
    # Of several joint posteriors under one joint prior the KL is estimated at the draw.
    net = mlp(4, 3, 4)
    bnn = joints.vcl(joints.INDUCING["AutoInducing, diagonal"], net)
    joint, prior = joints.joint_prior(net)
    bnn.update_prior(prior)
    torch.manual_seed(3)
    kl = kl_of(bnn)
    torch.manual_seed(3)
    trace = poutine.trace(bnn.net_guide).get_trace()
    values = {name: trace.nodes[name]["value"] for name in joint.names}
    expected = trace.log_prob_sum() - joint.log_prob(joint.flatten(values))
    torch.testing.assert_close(kl, expected, **joints.EXACT)


def test_no_weight_is_drawn_where_the_kl_has_a_closed_form():
    bnn = with_joint()
    with tyxe.poutine.local_reparameterization():
        for closed in (True, False):
            terms = elbo_terms(bnn.model, bnn.guide, *data(), closed_form_kl=closed)
            assert [draw.was_drawn for draw in terms.values.values()] == [not closed] * 4


def test_the_potential_of_mcmc_is_that_of_the_model():
    net, batch = joints.small_net(), data()
    joint, prior = joints.joint_prior(net)
    bnn = tyxe.MCMC_BNN(net, prior, LIKELIHOOD, NUTS)
    values = joint.unflatten(torch.randn(joint.event_shape))
    _, expected, _, _ = initialize_model(bnn.model, batch)
    potential = Potential(bnn, *batch)
    found = potential.at(potential.flatten(values))
    torch.testing.assert_close(found, expected(values), **joints.EXACT)
    bnn.fit([batch], 3, warmup_steps=2, disable_progbar=True)


def test_a_new_bnn_may_start_with_a_joint_prior():
    net = joints.small_net()
    joint, prior = joints.joint_prior(net)
    at_prior = {
        "init_loc_fn": tyxe.guides.init_to_median,
        "init_scale": tyxe.guides.scale_below_prior(0.0),
    }
    builder = functools.partial(tyxe.guides.AutoNormal, **at_prior)
    bnn = tyxe.VariationalBNN(net, prior, LIKELIHOOD, builder)
    means = joint.unflatten(joint.mean)
    scales = joint.unflatten(joint.variance.sqrt())
    for name, q in bnn.net_guide.get_detached_distributions().items():
        torch.testing.assert_close(q.mean, means[f"net.{name}"])
        torch.testing.assert_close(q.stddev, scales[f"net.{name}"])
    other = copy.deepcopy(bnn)
    other.load_state_dict(bnn.state_dict())
    assert other.float().net_prior.joints()[0].loc.dtype == torch.float32


@pytest.mark.parametrize("guide", GUIDES)
def test_every_guide_may_be_built_on_a_joint_prior(guide):
    net = joints.small_net()
    bnn = tyxe.VariationalBNN(net, joints.joint_prior(net)[1], LIKELIHOOD, GUIDES[guide])
    history = bnn.fit([data()], torch.optim.Adam, 1)
    assert torch.isfinite(torch.tensor(history.loss[0]))
    if guide in joints.SPREAD:
        joints.four_lines(bnn)


def rejects(bnn, prior, error, match):
    before = [id(entry) for entry in bnn.net_prior._entries]
    held = bnn.prior
    with pytest.raises(error, match=match):
        bnn.update_prior(prior)
    assert [id(entry) for entry in bnn.net_prior._entries] == before
    assert bnn.prior is held


def by_own_name(joint, names=None):
    return {n.removeprefix("net."): joint.marginal(n) for n in names or joint.names}


def test_some_sites_of_a_joint_prior_name_the_missing_ones():
    bnn = joints.vcl(GUIDES["AutoNormal"], joints.small_net())
    joint, prior = joints.joint_prior(bnn.net)
    some = {**prior.dist_dict, "net.2.bias": dist.Normal(0.0, 1.0).expand([1])}
    rejects(bnn, DictPrior(some), ValueError, r"2\.weight have it, and net\.2\.bias not")
    blocks = ParamBlocks((*joint.blocks, SiteBlock("net.4.bias", torch.Size([1]))))
    larger = Gaussian(blocks, torch.zeros(14), Diagonal(torch.ones(14)))
    message = r"and net\.4\.bias not. Ask for all of them: get_detached_distributions"
    rejects(bnn, DictPrior(by_own_name(larger, joint.names)), ValueError, message)


def test_joint_posteriors_of_other_sites_or_shapes_are_refused():
    bnn = joints.vcl(GUIDES["AutoNormal"], joints.small_net())
    for net, message in (
        (mlp(2, 4, 1), r"'0\.weight' has shape \(4, 2\), but the param"),
        (nn.Linear(2, 1), r"no entry for '0\.weight'; it has weight, bias"),
    ):
        posterior = joints.vcl(net=net).net_guide.get_detached_distributions()
        rejects(bnn, DictPrior(posterior), ValueError, message)
    joint, _ = joints.joint_prior(joints.small_net())
    named = mean_field(joints.small_net(), LIKELIHOOD, joints.normal_prior(), name="a")
    message = r"'a\.net\.0\.weight' is that of 'net\.0"
    rejects(named, DictPrior(by_own_name(joint)), ValueError, message)
    square = joints.vcl(GUIDES["AutoNormal"], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    swapped = by_own_name(joints.joint_prior(square.net)[0])
    swapped["0.weight"], swapped["1.weight"] = swapped["1.weight"], swapped["0.weight"]
    rejects(square, DictPrior(swapped), ValueError, "give the marginals by their own names")


@pytest.mark.parametrize("make", [mean_field, tyxe.LaplaceBNN])
def test_no_prior_update_within_a_fit(make):
    prior = joints.normal_prior()
    net, copies = joints.small_net(), []
    bnn = mean_field(net, LIKELIHOOD) if make is mean_field else make(net, prior, LIKELIHOOD)

    def callback(bnn, epoch, loss):
        copies.append(copy.deepcopy(bnn))
        rejects(bnn, prior, RuntimeError, "cannot be updated within a fit")
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bnn.fit([data()], torch.optim.Adam, 3, callback=callback)
    assert len(copies) == 2
    # After it, and in a copy that a callback made, it can.
    for one in (bnn, *copies):
        one.update_prior(prior)


def test_one_site_of_a_joint_prior_cannot_be_scaled():
    bnn = with_joint()
    with (
        pytest.raises(ValueError, match="cannot be scaled one by one: expose all of them"),
        tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight"]),
    ):
        kl_of(bnn)
    full = kl_of(bnn).item()
    with tyxe.poutine.selective_scale(scale=0.5, expose=list(bnn.net_prior.names())):
        assert kl_of(bnn).item() == pytest.approx(full / 2)
