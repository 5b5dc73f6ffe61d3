"""The inducing-weights guide: contract, layers, parameters, sizes, counts and the objective."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchvision
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import tyxe
from tests.oracles.inducing import FAMILIES, SMALL, build, data, make, mlp, program, wide_net
from tyxe.bnn import elbo_terms
from tyxe.distributions.inducing_formulas import conditional_divergence
from tyxe.guides import AutoInducing, AutoNormal, parameter_count, prune_inducing_
from tyxe.priors import IIDPrior, LayerwiseNormalPrior
from tyxe.testing import check_guide

# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_contract(family, whitened):
    check_guide(build(q_inducing=family, whitened=whitened))


@pytest.mark.parametrize(
    "keywords",
    [
        {"inducing_rows": 4, "inducing_cols": 5, "whitened": False},
        {"hierarchical": (2, 1)},
        {"max_lambda": 0.5, "max_scale_u": 0.4},
        {"inducing_rows": {"0.weight": 2, "2.weight": None}, "everywhere": False},
    ],
    ids=",".join,
)
def test_contract_of_sizes_caps_and_hierarchies(keywords):
    check_guide(build(q_inducing="matrix", **keywords))


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
    with pytest.raises(ValueError, match=r"no site '2.weight'; expected one of 0.weight"):
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
    named = AutoInducing(program(nn.ModuleDict({"scale": nn.Linear(9, 9)})), 2, 2)
    assert named.parameter_kinds()["row_maps.scale.weight"] == "loc"
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


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (4, 5, {"0.weight": (4, 5)}),  # 30 x 21; the last layer, 2 x 31, stays mean field
        (0.2, 0.5, {"0.weight": (6, 10)}),
        (40, 2, {"0.weight": (30, 2), "2.weight": (2, 2)}),
        ({"0.weight": 3, "2.weight": 9}, 4, {"0.weight": (3, 4), "2.weight": (2, 4)}),
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


# --- counts -------------------------------------------------------------------------------------

NORMS = 53_120  # parameters of the norms, which are not random


def test_counts_of_a_resnet():
    """ResNet-50 for CIFAR [T tab. 4.9]: a stem of 3 x 3, ten classes."""
    net = torchvision.models.resnet50(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    assert sum(p.numel() for p in net.parameters()) == 23_520_842
    resnet = program(net, IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d]))
    for family, m, count in (("diagonal", 16, 1_384_662), ("ensemble", 64, 6_374_454)):
        guide = AutoInducing(resnet, m, m, q_inducing=family, ensemble_size=5, everywhere=True)
        assert NORMS + parameter_count(guide) == count
    guide = AutoInducing(resnet, 64, 64, everywhere=True)
    prune_inducing_(guide, 0.25)
    assert NORMS + parameter_count(guide) == 1_804_566


# --- the objective ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kl_is_that_of_the_parts(family):
    bnn = make(build(q_inducing=family, inducing_rows={"0.weight": 2, "2.weight": None}))
    x, y = data()
    terms = elbo_terms(bnn.model, bnn.guide, x, y)
    guide = bnn.net_guide
    expected = sum(q.kl_from_prior() for q in guide.joints())
    for name in ("net.2.weight", "net.2.bias"):
        q = guide.posterior()[name]
        prior = dict(bnn.net_prior.priors())[name.removeprefix("net.")]
        expected = expected + torch.distributions.kl_divergence(q, prior)
    torch.testing.assert_close(terms.kl, expected, rtol=1e-9, atol=1e-9)
    assert set(terms.values) >= {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


@pytest.mark.parametrize("hierarchical", [None, (2, 1)])
def test_without_closed_forms_it_is_pyros_trace_elbo(hierarchical):
    bnn = make(build(hierarchical=hierarchical))
    x, y = data()
    found = []
    for closed in (False, True):
        pyro.set_rng_seed(3)
        terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=closed)
        bnn.zero_grad()
        loss = terms.kl - terms.data
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in bnn.net_guide.parameters()]))
    pyro.set_rng_seed(3)
    bnn.zero_grad()
    loss = Trace_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    loss.backward()
    assert found[0][0] == pytest.approx(loss.item(), rel=1e-10)
    for gradient, parameter in zip(found[0][1], bnn.net_guide.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-9)
    assert found[1][0] != pytest.approx(found[0][0])
    # Pyro's closed forms know no joint posterior: it must agree with its own sampled KL.
    pyro.set_rng_seed(3)
    loss = TraceMeanField_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    assert math.isfinite(loss.item())


def test_scaling_sites_of_a_layer():
    bnn = make(build())
    x, y = data()
    plain = elbo_terms(bnn.model, bnn.guide, x, y).kl
    first = next(iter(bnn.net_guide.joints())).kl_from_prior()
    with tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight", "0.bias"]):
        scaled = elbo_terms(bnn.model, bnn.guide, x, y).kl
    torch.testing.assert_close(scaled, plain - first / 2, rtol=1e-9, atol=1e-9)
    with (
        tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight"]),
        pytest.raises(ValueError, match=r"prior of net.0.weight, net.0.bias is one, so their"),
    ):
        elbo_terms(bnn.model, bnn.guide, x, y)


def test_a_site_that_the_model_lacks():
    bnn = make(build())
    with pytest.raises(ValueError, match=r"the guide samples 'net.0.weight', which the model does"):
        elbo_terms(lambda: None, bnn.guide)


def test_the_function_space_form_weighs_the_conditional():
    bnn = make(build(inducing_rows={"0.weight": 2, "2.weight": None}, dataset_size=2))
    (q,) = bnn.net_guide.joints()
    divergence = conditional_divergence(q.conditional_scale, 9)
    expected = min(1.0, 2 / 3) * divergence + q.u.kl()
    torch.testing.assert_close(q.kl_from_prior(), expected)
    (q,) = AutoInducing(program(nn.Linear(2, 3)), **SMALL, dataset_size=100).joints()
    assert q.weight == 1.0


def test_max_lambda_zero_is_a_function_of_u():
    bnn = make(build(max_lambda=0.0, q_inducing="ensemble", ensemble_size=1))
    draws = [bnn.net_guide()["net.0.weight"] for _ in range(2)]
    assert torch.equal(*draws)
    assert bnn.net_guide.get_lambda("0.weight") == 0.0
    assert elbo_terms(bnn.model, bnn.guide, *data()).kl == 0.0
