"""Sizes of inducing weights by layer, and how many parameters they make."""

import pyro.distributions as dist
import pytest
import torchvision
from torch import nn

import tyxe
from tests.oracles.inducing import program, wide_net
from tyxe.guides import AutoInducing, AutoNormal, parameter_count, prune_, prune_inducing_
from tyxe.priors import IIDPrior

# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (4, 5, {"0.weight": (4, 5)}),  # 30 x 21; the last layer, 2 x 31, stays mean field
        (0.2, 0.5, {"0.weight": (6, 10)}),
        (40, 2, {"0.weight": (30, 2), "2.weight": (2, 2)}),
        ({"0.weight": 3, "2.weight": 2}, 4, {"0.weight": (3, 4), "2.weight": (2, 4)}),
        ({"net.0.weight": None, "2.weight": 1.0}, 4, {"2.weight": (2, 4)}),
    ],
)
def test_sizes_by_layer(rows, columns, expected):
    guide = AutoInducing(program(wide_net()), rows, columns)
    assert {layer.name: (layer.rows, layer.columns) for layer in guide.layers} == expected
    held = {site.own_name.split(".")[0] for site in guide.rest.sites} if guide.rest else set()
    assert held == {"0", "2"} - {name.split(".")[0] for name in expected}


def test_sizes_as_they_are_everywhere():
    guide = AutoInducing(program(wide_net()), 40, 50, everywhere=True)
    assert [(layer.rows, layer.columns) for layer in guide.layers] == [(40, 50)] * 2
    assert guide.rest is None


def test_layers_that_do_not_gain_stay_mean_field():
    # 30 x 21: M = (7, 7) needs 7 * 31 + 7 * 22 + 1 + 98 = 470 of 1260 parameters.
    guide = AutoInducing(program(wide_net()), 7, 7)
    assert sum(p.numel() for n, p in guide.named_parameters() if not n.startswith("rest.")) == 470
    with pytest.raises(ValueError, match="no layer has fewer parameters than a mean field"):
        AutoInducing(program(wide_net()), 30, 21)


# --- counts -------------------------------------------------------------------------------------

NORMS = 53_120  # parameters of the norms, which are not random
COUNTS = {"diagonal": [1_384_662, 27_992_502], "ensemble": [1_426_134, 38_609_334]}


@pytest.fixture(scope="module")
def resnet():
    """ResNet-50 for CIFAR [T tab. 4.9]: a stem of 3 x 3, ten classes."""
    net = torchvision.models.resnet50(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    assert sum(p.numel() for p in net.parameters()) == 23_520_842
    hidden = IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=[nn.BatchNorm2d])
    return program(net, hidden)


@pytest.mark.parametrize("family", COUNTS)
def test_counts_of_a_resnet(resnet, family):
    found = []
    for m in (16, 256):
        guide = AutoInducing(resnet, m, m, q_inducing=family, ensemble_size=5, everywhere=True)
        found.append(NORMS + parameter_count(guide))
    assert found == COUNTS[family]


def test_counts_of_a_pruned_resnet(resnet):
    guide = AutoInducing(resnet, 64, 64, everywhere=True)
    prune_inducing_(guide, 0.25)
    assert NORMS + parameter_count(guide) == 1_804_566
    guide = AutoNormal(resnet, init_loc_fn=tyxe.guides.init_to_sample)
    assert NORMS + parameter_count(guide) == 46_988_564
    prune_(guide, 0.01)
    assert NORMS + parameter_count(guide) == 522_494
