"""Inducing weights by hand are ours, and as few as the paper says."""

import pytest
import torch
from torch import nn

from tests.benchmarks.nets import small_net
from tests.benchmarks.places import Helper
from tyxe.bnn import elbo_terms


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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


def test_sizes_of_inducing_weights_are_the_paper_s(helper: Helper) -> None:
    """A mean field has twice the net's weights, its norms once."""
    script = helper("inducing")
    net = helper("_nets").resnet18()
    plain = sum(p.numel() for p in net.parameters())
    norms = sum(
        p.numel() for n in net.modules() if isinstance(n, nn.BatchNorm2d) for p in n.parameters()
    )
    size = script.size(script.ffg_w(net), net)["parameters, to plain"]
    assert size == pytest.approx((2 * plain - norms) / plain, rel=1e-12)
    assert script.size(script.inducing(net, 64), net)["parameters, to plain"] < 0.3
