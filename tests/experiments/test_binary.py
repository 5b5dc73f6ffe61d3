"""experiments/binary.py and binary_continual.py: nets of signs, their curves, and what is kept."""

import math

import binary
import pytest
import torch
from torch import nn

import tyxe


def test_gradients_pass_straight_through_the_sign():
    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.linspace(-0.7, 0.4, 12).view(3, 4))
    start = net[0].weight.clone()
    binary.by_sign_(net)
    assert torch.equal(net[0].weight, 0.5 * torch.where(start < 0, -1.0, 1.0))
    (real,) = net.parameters()
    torch.testing.assert_close(real, (start / 0.5).clamp(-1, 1))
    x, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    nn.functional.cross_entropy(net(x), target).backward()
    # The same as of the weights themselves, times the scale.
    weight = net[0].weight.detach().clone().requires_grad_()
    nn.functional.cross_entropy(x @ weight.T, target).backward()
    torch.testing.assert_close(real.grad, 0.5 * weight.grad)


def test_curves_of_binary_nets():
    known = torch.tensor([[0.95, 0.05], [0.7, 0.3], [0.2, 0.8]])
    unknown = torch.tensor([[0.5, 0.5], [0.99, 0.01]])
    found = binary.curves(known, torch.tensor([0, 1, 1]), unknown)
    assert found["probability"][9] == pytest.approx(0.95)
    assert found["frequency"][9] == 1
    assert (found["probability"][7], found["frequency"][7]) == (pytest.approx(0.7), 0)
    assert found["probability"][5] is None
    below = dict(zip(binary.ENTROPIES, found["share of OOD"], strict=True))
    assert [share for v, share in below.items() if v < 0.05] == [0.0]
    assert {share for v, share in below.items() if 0.1 < v < 0.6} == {0.5}
    above = dict(zip(binary.CONFIDENCES, found["accuracy above"], strict=True))
    assert above[0.1] == pytest.approx(2 / 5)
    assert above[0.75] == pytest.approx(2 / 3, abs=1e-5)  # recorded to five digits
    assert above[0.99] == 0
    assert binary.mean_of([{"a": [1.0, None]}, {"a": [2.0, None]}]) == {"a": [1.5, None]}


def test_entropy_of_weights():
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    bnn = binary.bernoulli_bnn(net, tyxe.priors.BinaryPrior(), 5)
    with torch.no_grad():
        bnn.net_guide.get_logits("0.weight").zero_()
        bnn.net_guide.get_logits("1.weight").fill_(200.0)
    mean, by_site = binary.weight_entropy(bnn)
    assert by_site == {"0.weight": pytest.approx(math.log(2)), "1.weight": pytest.approx(0)}
    assert mean == pytest.approx(6 / 8 * math.log(2))
