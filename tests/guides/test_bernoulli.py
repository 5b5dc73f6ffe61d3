"""Binary weights: contract, where logits start, priors that fit and posteriors as priors."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

from tests.oracles.binary import EXACT, disturb_, fit, kl_of, make, mlp, weights
from tyxe.distributions import SignedBernoulli
from tyxe.guides import AutoBernoulli, PretrainedInitializer, init_to_zero
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior, LambdaPrior
from tyxe.priors.sites import SitePriors
from tyxe.testing import check_guide

# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        BinaryPrior(),
        BinaryPrior(scale="radford"),
        BinaryPrior(delta=1e-3, scale=0.5),
        IIDPrior(SignedBernoulli(0.7)),
    ],
    ids=["plain", "rescaled", "beta", "iid"],
)
def test_contract(prior):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    check_guide(AutoBernoulli, SitePriors(prior.sites(net), net))


def test_the_two_values_are_part_of_the_state():
    with pytest.raises(RuntimeError, match=r"AutoBernoulli\(1\) here and AutoBernoulli\(0\.3535"):
        make().load_state_dict(make(weights(scale="radford")).state_dict())


def test_a_saved_delta_is_loaded():
    bnn = disturb_(make(weights(delta=0.1)))
    expected, other = kl_of(bnn), make(weights(delta=0.5))
    other.load_state_dict(bnn.state_dict())
    assert kl_of(other) == expected
    assert expected > 0
    with pytest.raises(RuntimeError, match=r"SignedBernoulli.* here and .*SignedBetaBernoulli"):
        make().load_state_dict(bnn.state_dict())


# --- where logits start -------------------------------------------------------------------------


def test_means_start_at_the_nets_own_weights():
    net = mlp()
    bnn = make(net=net)
    for name in ("0.weight", "3.weight"):
        own = net.get_parameter(name)
        q = bnn.net_guide.posterior()[f"net.{name}"]
        torch.testing.assert_close(q.mean, own, **EXACT)
        torch.testing.assert_close(bnn.net_guide.get_logits(name), 2 * torch.atanh(own), **EXACT)
    rescaled = make(weights(scale="radford"), net=net)
    q = rescaled.net_guide.posterior()["net.0.weight"]
    assert q.base_dist.scale == 4**-0.5
    # PyTorch draws a linear layer's weights below 1 / sqrt(fan_in), which is the scale.
    limit = 0.99 * 4**-0.5
    torch.testing.assert_close(q.mean, net[0].weight.clamp(-limit, limit), **EXACT)


def test_means_start_elsewhere_on_request():
    trained = mlp()
    of_trained = PretrainedInitializer.from_net(trained)
    bnn = make(guide=functools.partial(AutoBernoulli, init=of_trained))
    mean = bnn.net_guide.posterior()["net.0.weight"].mean
    torch.testing.assert_close(mean, trained[0].weight, **EXACT)
    bnn = make(weights(scale=0.5), functools.partial(AutoBernoulli, init=of_trained, init_gain=3.0))
    logits = bnn.net_guide.get_logits("net.0.weight")
    torch.testing.assert_close(logits, 6 * trained[0].weight, **EXACT)
    bnn = make(guide=functools.partial(AutoBernoulli, init=init_to_zero))
    assert bnn.net_guide.get_logits("0.weight").abs().max() == 0


def test_weights_beyond_the_values_are_clipped():
    net = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[7.0, -1.0]]))
    bnn = make(BinaryPrior(), net=net)
    mean = bnn.net_guide.posterior()["net.weight"].mean
    torch.testing.assert_close(mean, torch.tensor([[0.99, -0.99]]), rtol=1e-5, atol=1e-5)


def test_a_program_without_a_net():
    class Noise:
        prefix = "likelihood."

        def __call__(self):
            return {"likelihood.sign": pyro.sample("likelihood.sign", SignedBernoulli(0.0))}

    guide = AutoBernoulli(Noise(), init=init_to_zero)
    assert guide.median()["likelihood.sign"].item() == 1.0


# --- priors that do not fit ---------------------------------------------------------------------


def test_a_prior_of_other_values_is_named():
    def mixed(name, module, param):
        return (SignedBernoulli(0.0) if name == "0.weight" else dist.Bernoulli(0.5)).expand(
            param.shape
        )

    with pytest.raises(ValueError, match=r"prior of 'net.3.weight' has the support Boolean"):
        make(LambdaPrior(mixed, expose_fn=lambda _, name: name in ("0.weight", "3.weight")))


# --- posterior to prior -------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [None, 0.1])
def test_a_posterior_that_became_the_prior_has_no_kl(delta):
    bnn = disturb_(make(weights(delta=delta, scale="radford")))
    posterior = bnn.net_guide.posterior()
    if delta is None:
        expected = sum(
            (math.log(2) - q.base_dist.entropy()).sum().item() for q in posterior.values()
        )
    else:
        expected = sum(
            -delta * (q.base_dist.probs * (1 - q.base_dist.probs)).log().sum().item()
            for q in posterior.values()
        )
    assert kl_of(bnn) == pytest.approx(expected, rel=1e-8)
    bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert kl_of(bnn) == 0
    disturb_(bnn)
    assert kl_of(bnn) > 0.1
    fit(bnn)


@pytest.mark.parametrize(
    "prior",
    [
        BinaryPrior(scale=0.5),
        IIDPrior(dist.Normal(0.0, 1.0)),
        IIDPrior(dist.Bernoulli(0.5)),
    ],
    ids=["scale", "normal", "bernoulli"],
)
def test_a_prior_of_other_values_does_not_replace_it(prior):
    bnn = make()
    before = kl_of(bnn)
    with pytest.raises(ValueError, match=r"new prior of '0.weight' .* another support"):
        bnn.update_prior(prior)
    assert kl_of(bnn) == before
