"""What is written by hand is ours: steps, predictions, inducing weights, curvature, evidence."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tests.benchmarks.helpers import Helper, in_double, small_net
from tyxe.bnn import elbo_terms

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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


def test_predictions_by_hand_are_of_the_same_posterior(helper: Helper) -> None:
    net, x, _ = small_net("mlp", helper)
    predictor = helper("_by_hand").Predictor(net, 1e-9, num_predictions=11)
    expected = net(x).log_softmax(-1).detach()
    for predicted in (predictor.loop(x), predictor.vmapped(x, chunk=4)):
        torch.testing.assert_close(predicted, expected, rtol=1e-6, atol=1e-6)


def test_batched_particles_by_hand_are_the_same_objective(helper: Helper) -> None:
    """Without spread, eight draws give the plain loss; with one, they are independent."""
    script = helper("particles")
    net, x, y = small_net("mlp", helper)
    batched = script.Batched(net, 50, F.cross_entropy)
    with torch.no_grad():
        for rho in batched.rhos:
            rho.fill_(math.log(1e-9))
    nll, variances = batched.data_term(x, y)
    torch.testing.assert_close(nll, F.cross_entropy(net(x), y), rtol=1e-6, atol=0)
    assert [v.shape for v in variances] == [p.shape for p in net.parameters()]
    outputs: list[torch.Tensor] = []
    batched = script.Batched(nn.Linear(1, 1), 50, lambda y, _: outputs.append(y) or y.sum())
    batched.data_term(torch.ones(1, 1), torch.ones(1, 1))
    assert len(outputs[0].unique()) == script.PARTICLES
    expected = -torch.distributions.Normal(x, script.NOISE).log_prob(x + 1).mean()
    torch.testing.assert_close(script.gaussian_nll(x, x + 1), expected)


# --- inducing weights ---------------------------------------------------------------------------


def test_inducing_by_hand_is_ours(helper: Helper) -> None:
    """With the same parameters and random numbers, loss, gradients and predictions are equal."""
    script, m = helper("inducing"), 3
    net, x, y = small_net("resnet18", helper)
    torch.manual_seed(0)
    hand, bnn = script.by_hand(net, m), script.inducing(net, m)
    guide, layers = bnn.net_guide, bnn.net_guide.layers
    assert [layer.name for layer in layers] == [f"{name}.weight" for name in hand.layers]
    ours = [*guide.row_maps.parameters(), *guide.column_maps.parameters()]
    for own, other in zip(hand.maps, ours, strict=True):
        own.data = other.detach().clone()
    hand.loc.data = torch.stack([guide.u[f"locs.{layer.name}"].detach() for layer in layers])
    for name in ("log_d", "raw_lambda", "raw_scale"):
        setattr(hand, name, getattr(hand, name).detach().double().requires_grad_())
    bnn.train()
    torch.manual_seed(1)
    terms = elbo_terms(bnn.model, bnn.guide, x, y)
    loss = (terms.kl - terms.data) / script.POINTS
    loss.backward()
    torch.manual_seed(1)
    own = hand.loss(x, y)
    own.backward()
    # Ours starts at numbers that were read from float32.
    torch.testing.assert_close(own, loss, rtol=1e-6, atol=0)
    for own, other in zip(hand.maps, ours, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-9)
    grads = torch.stack([guide.u[f"locs.{layer.name}"].grad for layer in layers])
    torch.testing.assert_close(hand.loc.grad, grads, rtol=1e-4, atol=1e-9)
    raws = torch.stack([guide.conditional_scales[layer.name].grad for layer in layers])
    torch.testing.assert_close(hand.raw_lambda.grad, raws, rtol=1e-4, atol=1e-9)
    torch.manual_seed(2)
    found = hand.predict(x, 3)
    torch.manual_seed(2)
    expected = bnn.predict(x, num_predictions=3).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- Laplace ------------------------------------------------------------------------------------


def laplace_pair(helper: Helper, structure: str, last: bool = False) -> tuple[Any, Any, Any]:
    """Return Laplace by hand and ours on the small CNN, and its data, in float64."""
    script, by_hand = helper("laplace"), helper("_laplace_by_hand")
    net = script.cnn(True).double()
    batches = [(x.double(), y) for x, y in script.data(True)]
    batches = [(x[half], y[half]) for x, y in batches for half in (slice(5), slice(5, None))]
    bnn = script.make_bnn(net, script.points_in(batches), structure, last=last)
    bnn.fit_curvature(batches, progress=False)
    return by_hand.HandLaplace(net), bnn, batches


def blocks_of(bnn: Any) -> list[torch.Tensor]:
    return [block.to_dense() for block in bnn.state.curvature.operator.blocks.values()]


def by_eigen(eigen: Any) -> torch.Tensor:
    basis = torch.kron(eigen.gradient_basis, eigen.input_basis)
    return (basis * eigen.values.flatten()) @ basis.mT


def test_curvature_by_hand_is_ours(helper: Helper) -> None:
    hand, bnn, batches = laplace_pair(helper, "kron")
    hand.kron(batches, helper("_laplace_by_hand").softmax_roots)
    for eigen, block in zip(hand.eigen.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(by_eigen(eigen), block, rtol=1e-8, atol=1e-10)
    x = batches[0][0]
    predicted = bnn.predict(x, link="probit").exp()
    torch.testing.assert_close(hand.predict(x).detach(), predicted, rtol=1e-8, atol=1e-10)
    hand.ascend(1_000)
    assert hand.precision == pytest.approx(float(bnn.optimize_prior_precision()), rel=1e-4)
    hand, bnn, batches = laplace_pair(helper, "diag")
    hand.diag(batches, helper("_laplace_by_hand").softmax_roots)
    for diagonal, block in zip(hand.diagonal.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(diagonal.flatten(), block.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_last_layer_by_hand_is_ours(helper: Helper, structure: str) -> None:
    hand, bnn, batches = laplace_pair(helper, structure, last=True)
    x = batches[0][0]
    (block,) = blocks_of(bnn)
    if structure == "kron":
        hand.head_kron(batches)
        torch.testing.assert_close(by_eigen(hand.head_eigen), block, rtol=1e-8, atol=1e-10)
        predicted = hand.head_predict_kron(x)
    else:
        hand.head_full(batches)
        torch.testing.assert_close(hand.head_matrix, block, rtol=1e-8, atol=1e-10)
        hand.head_factorize()
        predicted = hand.head_predict_full(x)
    torch.testing.assert_close(
        predicted, bnn.predict(x, link="probit").exp(), rtol=1e-8, atol=1e-10
    )
