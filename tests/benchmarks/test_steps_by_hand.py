"""Training steps and predictions by hand have the objective and the posterior of ours."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tests.benchmarks.nets import in_double, small_net
from tests.benchmarks.places import Helper
from tyxe.bnn import elbo_terms

METHODS = ["plain sampling", "local reparameterisation", "flipout"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net_name", ["mlp", "resnet18"])
def test_by_hand_is_the_same_objective(helper: Helper, net_name: str, method: str) -> None:
    """KL and its gradient equal ours; without spread, so do the data term and its gradient."""
    script = helper("training_step")
    net, x, y = small_net(net_name, helper)
    num_points, scale = 50, 1e-7
    by_hand, handler = script.METHODS[method]
    bnn = script.make_bnn(net, num_points)
    with torch.no_grad():
        for raw in bnn.net_guide.unconstrained_scales.parameters():
            raw.fill_(math.log(scale))
    bnn.train()
    with handler():
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
    ((terms.kl - terms.data) / num_points).backward()

    hand = by_hand(net, num_points, scale)
    nll, variances = hand.data_term(x, y)
    nll.backward()
    kl = hand._add_kl(variances)
    torch.testing.assert_close(kl.double(), terms.kl.detach(), rtol=1e-6, atol=0.0)
    # A spread of 1e-7 (and 1e-6, by hand, where a variance would be zero) moves outputs as much.
    torch.testing.assert_close(nll.detach(), -terms.data.detach() / num_points, rtol=1e-4, atol=0)
    torch.testing.assert_close(nll.detach(), F.cross_entropy(net(x), y), rtol=1e-4, atol=0)
    for name, loc in zip(hand.names, hand.locs, strict=True):
        ours = bnn.net_guide.locs[name].grad
        torch.testing.assert_close(loc.grad, ours, rtol=1e-3, atol=1e-3 * float(ours.abs().max()))


def test_binary_by_hand_is_the_same_objective(helper: Helper) -> None:
    """Without spread, data term and gradient equal ours; KL and gradient do at any logits."""
    script = helper("binary_step")
    net, (x, y) = script.tanh_mlp(True).double(), in_double(helper("_nets").vectors(6, True))
    for factor in (60.0, 2.0):
        bnn = script.make_bnn(net, 50)
        hand = script.BinaryByHand(copy.deepcopy(net), 50)
        with torch.no_grad():
            for name, phi in zip(hand.names, hand.logits, strict=True):
                torch.testing.assert_close(phi, bnn.net_guide.get_logits(name), rtol=1e-12, atol=0)
                # Nowhere close to 0, so that a large factor leaves no spread.
                phi.copy_(factor * (phi + phi.sign()))
                bnn.net_guide.get_logits(name).copy_(phi)
        bnn.train()
        with tyxe.poutine.local_reparameterization():
            terms = elbo_terms(bnn.model, bnn.guide, x, y)
        (terms.kl / 50).backward()
        nll, variances = hand.data_term(x, y)
        for phi in hand.logits:
            phi.grad = torch.zeros_like(phi)
        torch.testing.assert_close(hand.add_kl(variances), terms.kl.detach(), rtol=1e-9, atol=0)
        for name, phi in zip(hand.names, hand.logits, strict=True):
            ours = bnn.net_guide.get_logits(name).grad
            torch.testing.assert_close(phi.grad, ours, rtol=1e-10, atol=1e-14)
        if factor == 60:
            expected = -terms.data.detach() / 50
            torch.testing.assert_close(nll.detach(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_by_hand_spreads_outputs_alike(helper: Helper, method: str) -> None:
    """Mean and variance of one layer's outputs, by hand, are those of the weights' Normals."""
    net = nn.Sequential(nn.Linear(4, 3)).double()
    x = torch.rand(1, 4, dtype=torch.float64)
    scale, count = 0.5, 4000
    by_hand, _ = helper("training_step").METHODS[method]
    hand = by_hand(net, 10, scale)
    outputs = []
    hooked = hand.net.register_forward_hook(lambda _, __, out: outputs.append(out.detach()))
    for _ in range(count):
        hand.data_term(x, torch.tensor([0]))
    hooked.remove()
    found = torch.cat(outputs)
    variance = scale**2 * (x.square().sum() + 1)
    # Five standard errors of a mean and of a Gaussian's variance.
    mean_error = 5 * math.sqrt(variance / count)
    torch.testing.assert_close(found.mean(0), net(x)[0].detach(), rtol=0, atol=mean_error)
    variance_error = 5 * math.sqrt(2 / count)
    torch.testing.assert_close(found.var(0), variance.expand(3), rtol=variance_error, atol=0)


def test_predictions_by_hand_are_of_the_same_posterior(helper: Helper) -> None:
    net, x, _ = small_net("mlp", helper)
    predictor = helper("_by_hand").Predictor(net, 1e-9, num_predictions=11)
    expected = net(x).log_softmax(-1).detach()
    for predicted in (predictor.loop(x), predictor.vmapped(x, chunk=4)):
        torch.testing.assert_close(predicted, expected, rtol=1e-6, atol=1e-6)


def test_batched_particles_by_hand_are_the_same_objective(helper: Helper) -> None:
    """Without spread, eight draws give the plain loss; the KL is that of `Sampled`."""
    script = helper("particles")
    net, x, y = small_net("mlp", helper)
    batched = script.Batched(net, 50, F.cross_entropy)
    with torch.no_grad():
        for rho in batched.rhos:
            rho.fill_(math.log(1e-9))
    nll, variances = batched.data_term(x, y)
    torch.testing.assert_close(nll, F.cross_entropy(net(x), y), rtol=1e-6, atol=0)
    assert [v.shape for v in variances] == [p.shape for p in net.parameters()]


def test_batched_particles_by_hand_are_independent(helper: Helper) -> None:
    script = helper("particles")
    outputs = []
    batched = script.Batched(
        nn.Linear(1, 1), 50, lambda out, _: outputs.append(out.detach()) or out.sum()
    )
    batched.data_term(torch.ones(1, 1), torch.ones(1, 1))
    assert len(outputs[0].unique()) == script.PARTICLES


def test_gaussian_nll(helper: Helper) -> None:
    script = helper("particles")
    x, y = torch.randn(5, 1).double(), torch.randn(5, 1).double()
    expected = -torch.distributions.Normal(x, script.NOISE).log_prob(y).mean()
    torch.testing.assert_close(script.gaussian_nll(x, y), expected)
