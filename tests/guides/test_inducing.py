"""The inducing-weights guide: contract, sites and layers, bad arguments, parameters and caps."""

import functools

import pytest
import torch
from torch import nn

from tests.oracles.inducing import FAMILIES, SMALL, build, mlp, program, wide_net
from tyxe.guides import AutoInducing, AutoNormal
from tyxe.priors import LayerwiseNormalPrior
from tyxe.testing import check_guide

# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_contract(family, whitened):
    check_guide(build(q_inducing=family, whitened=whitened))


@pytest.mark.parametrize("family", ["diagonal", "matrix"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"inducing_rows": 4, "inducing_cols": 5},
        {"inducing_rows": 4, "inducing_cols": 5, "whitened": False},
        {"hierarchical": (2, 1)},
        {"max_lambda": 0.5, "max_scale_u": 0.4},
        {"inducing_rows": {"0.weight": 2, "2.weight": None}, "everywhere": False},
    ],
    ids=",".join,
)
def test_contract_of_sizes_caps_and_hierarchies(family, keywords):
    check_guide(build(q_inducing=family, **keywords))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.Conv2d(4, 2, 3, groups=2, bias=False)),
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Linear(4, 2, bias=False)),
        nn.Sequential(nn.Embedding(5, 3), nn.LSTM(3, 2), nn.LayerNorm([2, 2])),
        nn.MultiheadAttention(4, 2),
    ],
    ids=["convolutions", "transposed", "recurrent", "attention"],
)
def test_contract_of_other_layers(net):
    check_guide(build(), program(net.double()))


def test_bias_is_the_last_column_where_rows_are_outputs():
    net = nn.ModuleDict(
        {"a": nn.Conv2d(3, 4, 2), "b": nn.ConvTranspose2d(3, 4, 2), "c": nn.BatchNorm1d(5)}
    )
    guide = AutoInducing(program(net), **SMALL)
    names = [q.names for q in guide.joints()]
    assert names == [("net.a.weight", "net.a.bias"), ("net.b.weight",)]
    assert [layer.prior.shape for layer in guide.layers] == [(4, 13), (3, 16)]
    assert {s.own_name for s in guide.rest.sites} == {"b.bias", "c.weight", "c.bias"}


def test_priors_of_different_scales():
    guide = AutoInducing(program(mlp().double(), LayerwiseNormalPrior("radford")), **SMALL)
    scales = [
        dict(zip(layer.prior.block.sites, layer.prior.scales, strict=True))
        for layer in guide.layers
    ]
    assert scales[0] == pytest.approx({"net.0.weight": 2**-0.5, "net.0.bias": 2**-0.5})
    assert scales[1] == pytest.approx({"net.2.weight": 3**-0.5, "net.2.bias": 3**-0.5})


# --- parameters ---------------------------------------------------------------------------------


def test_starts_caps_and_kinds():
    guide = AutoInducing(
        program(wide_net()),
        4,
        5,
        init_lambda=0.01,
        max_lambda=0.03,
        max_scale_u=0.1,
        mean_field=functools.partial(AutoNormal, init_scale=1e-4),
    )
    for name in ("0.weight", "net.0.weight"):
        torch.testing.assert_close(guide.get_lambda(name), torch.tensor(0.01))
    with pytest.raises(ValueError, match=r"no site '2.weight'; the sites are 0.weight"):
        guide.get_lambda("2.weight")
    torch.testing.assert_close(
        guide.u.distributions()["0.weight"].variance_through(), torch.full((4, 5), 1e-3)
    )
    assert guide.row_maps["0.weight"].shape == (4, 30)
    assert guide.column_maps["0.weight"].shape == (5, 21)
    torch.testing.assert_close(guide.column_scales["0.weight"].exp(), torch.full((5,), 1e-3))
    kinds = guide.parameter_kinds()
    assert {name for name, kind in kinds.items() if kind == "loc"} == {
        "row_maps.0.weight",
        "column_maps.0.weight",
        "u.locs.0.weight",
        "rest.locs.2.weight",
        "rest.locs.2.bias",
    }
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(20.0)
    assert 0.029 < guide.get_lambda("0.weight") <= 0.03
    variance = guide.u.distributions()["0.weight"].variance_through()
    assert 0.0099 < variance.min() <= variance.max() <= 0.0100001


@pytest.mark.parametrize("family", ["full", "matrix"])
def test_caps_of_covariances(family):
    guide = AutoInducing(program(wide_net()), 4, 5, q_inducing=family, max_scale_u=0.1)
    with torch.no_grad():
        for name, parameter in guide.u.named_parameters():
            parameter.add_(20.0 if name.startswith("scales") else torch.randn_like(parameter))
    variance = guide.u.distributions()["0.weight"].variance_through()
    assert 0.0099 < variance.min() <= variance.max() <= 0.0100001


def test_unwhitened_guides_start_at_the_same_mean():
    guides = []
    for whitened in (True, False):
        torch.manual_seed(4)
        guides.append(AutoInducing(program(wide_net().double()), 4, 5, whitened=whitened).double())
    left, right = (guide.posterior()["net.0.weight"].mean for guide in guides)
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_caps_are_part_of_the_state():
    guide = AutoInducing(program(wide_net()), 4, 5)
    other = AutoInducing(program(wide_net()), 4, 5, max_lambda=0.1)
    with pytest.raises(RuntimeError, match="the guide is AutoInducing"):
        other.load_state_dict(guide.state_dict())
