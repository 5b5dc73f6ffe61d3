"""The inducing-weights guide: layers, parameters, the objective, training and prediction."""

import copy
import functools
import math
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torchvision
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn

import tyxe
from tests.oracles.inducing import (
    FAMILIES,
    SMALL,
    STANDARD,
    build,
    data,
    make,
    mlp,
    program,
    saved,
    wide_net,
)
from tyxe.bnn import elbo_terms
from tyxe.distributions import JointMarginal
from tyxe.distributions.inducing_formulas import conditional_divergence
from tyxe.guides import (
    AutoInducing,
    AutoNormal,
    InducingOptions,
    parameter_count,
    prune_inducing_,
)
from tyxe.priors import DictPrior, IIDPrior, LayerwiseNormalPrior
from tyxe.testing import check_guide

# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keywords",
    [
        *({"q_inducing": family} for family in FAMILIES),
        {"inducing_rows": 4, "inducing_cols": 5, "whitened": False},
        {"q_inducing": "ensemble", "whitened": False},
        {"hierarchical": (2, 1)},
        {"max_lambda": 0.5, "max_scale_u": 0.4},
        {"inducing_rows": {"0.weight": 2, "2.weight": None}, "everywhere": False},
    ],
    ids=str,
)
def test_contract(keywords):
    check_guide(build(**{"q_inducing": "matrix", **keywords}))


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Conv2d(2, 2, 2), nn.Conv2d(2, 2, 2, groups=2, bias=False)),
        nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.Linear(2, 2, bias=False)),
        nn.Sequential(nn.Embedding(3, 2), nn.LSTM(2, 1), nn.LayerNorm([2, 2])),
        nn.MultiheadAttention(2, 1),
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
    scales = {}
    for layer in guide.layers:
        scales |= dict(zip(layer.prior.block.sites, layer.prior.scales, strict=True))
    expected = {"net.0.weight": 2, "net.0.bias": 2, "net.2.weight": 3, "net.2.bias": 3}
    assert scales == pytest.approx({name: fan**-0.5 for name, fan in expected.items()})


# --- parameters ---------------------------------------------------------------------------------


def test_starts_and_kinds():
    mean_field = functools.partial(AutoNormal, init_scale=1e-4)
    guide = AutoInducing(program(wide_net()), 4, 5, init_lambda=0.01, mean_field=mean_field)
    torch.testing.assert_close(guide._lambda("0.weight"), torch.tensor(0.01))
    torch.testing.assert_close(variance_of_u(guide), torch.full((4, 5), 1e-3))
    assert guide.row_maps["0.weight"].shape == (4, 30)
    assert guide.column_maps["0.weight"].shape == (5, 21)
    torch.testing.assert_close(guide.column_scales["0.weight"].exp(), torch.full((5,), 1e-3))
    assert {name for name, kind in guide.parameter_kinds().items() if kind == "loc"} == {
        "row_maps.0.weight",
        "column_maps.0.weight",
        "u.locs.0.weight",
        "rest.locs.2.weight",
        "rest.locs.2.bias",
    }
    named = AutoInducing(program(nn.ModuleDict({"scale": nn.Linear(9, 9)})), 2, 2)
    assert named.parameter_kinds()["row_maps.scale.weight"] == "loc"
    options = InducingOptions(max_lambda=0.5)
    replaced = AutoInducing(program(wide_net()), 4, 5, options=options, max_scale_u=0.1)
    assert replaced.options == InducingOptions(max_lambda=0.5, max_scale_u=0.1)


def variance_of_u(guide):
    return guide.u.distributions()["0.weight"].variance_through()


@pytest.mark.parametrize("family", ["diagonal", "full", "matrix"])
def test_caps_of_covariances(family):
    options = {"q_inducing": family, "max_lambda": 0.03, "max_scale_u": 0.1}
    guide = AutoInducing(program(wide_net()), 4, 5, **options)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            is_scale = "scales" in name or "lambda" in name
            parameter.add_(20.0 if is_scale else torch.randn_like(parameter))
    assert 0.029 < guide._lambda("0.weight") <= 0.03
    variance = variance_of_u(guide)
    assert 0.0099 < variance.min() <= variance.max() <= 0.0100001


def test_unwhitened_guides_start_at_the_same_mean():
    means = []
    for whitened in (True, False):
        torch.manual_seed(4)
        guide = AutoInducing(program(wide_net().double()), 4, 5, whitened=whitened).double()
        means.append(guide.posterior()["net.0.weight"].mean)
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-6)


def test_caps_are_part_of_the_state():
    guide = AutoInducing(program(wide_net()), 4, 5)
    other = AutoInducing(program(wide_net()), 4, 5, max_lambda=0.1)
    with pytest.raises(RuntimeError, match="the guide is AutoInducing"):
        other.load_state_dict(guide.state_dict())


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "everywhere", "expected"),
    [
        (4, 5, False, {"0.weight": (4, 5)}),  # 30 x 21; the last layer, 2 x 31, stays mean field
        (0.2, 0.5, False, {"0.weight": (6, 10)}),
        (40, 2, False, {"0.weight": (30, 2), "2.weight": (2, 2)}),
        ({"0.weight": 3, "2.weight": 9}, 4, False, {"0.weight": (3, 4), "2.weight": (2, 4)}),
        ({"net.0.weight": None, "2.weight": 1.0}, 4, False, {"2.weight": (2, 4)}),
        (40, 50, True, {"0.weight": (40, 50), "2.weight": (40, 50)}),
    ],
)
def test_sizes_by_layer(rows, columns, everywhere, expected):
    guide = AutoInducing(program(wide_net()), rows, columns, everywhere=everywhere)
    assert {layer.name: (layer.rows, layer.columns) for layer in guide.layers} == expected
    held = {site.own_name.split(".")[0] for site in guide.rest.sites} if guide.rest else set()
    assert held == {"0", "2"} - {name.split(".")[0] for name in expected}


def test_counts_of_a_resnet():
    """ResNet-50 for CIFAR [T tab. 4.9]: a stem of 3 x 3, ten classes."""
    net = torchvision.models.resnet50(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    norms = 53_120  # parameters of the norms, which are not random
    assert sum(p.numel() for p in net.parameters()) == 23_520_842
    resnet = program(net, IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d]))
    guide = AutoInducing(resnet, 16, 16, everywhere=True)
    assert norms + parameter_count(guide) == 1_384_662
    guide = AutoInducing(resnet, 64, 64, everywhere=True)
    prune_inducing_(guide, 0.25)
    assert norms + parameter_count(guide) == 1_804_566


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
    bnn, (x, y) = make(build(hierarchical=hierarchical)), data()

    def loss_and_gradient(objective):
        pyro.set_rng_seed(3)
        loss = objective()
        return loss.detach(), torch.autograd.grad(loss, list(bnn.net_guide.parameters()))

    def ours(closed):
        terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=closed)
        return terms.kl - terms.data

    def pyros(kind):
        return kind().differentiable_loss(bnn.model, bnn.guide, x, y)

    sampled = loss_and_gradient(lambda: ours(False))
    expected = loss_and_gradient(lambda: pyros(Trace_ELBO))
    torch.testing.assert_close(sampled, expected, rtol=1e-8, atol=1e-9)
    assert loss_and_gradient(lambda: ours(True))[0] != pytest.approx(sampled[0])
    # Pyro's closed forms know no joint posterior: it must agree with its own sampled KL.
    assert math.isfinite(loss_and_gradient(lambda: pyros(TraceMeanField_ELBO))[0])


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
    assert bnn.net_guide._lambda("0.weight") is None
    assert elbo_terms(bnn.model, bnn.guide, *data()).kl == 0.0


# --- training and prediction ----------------------------------------------------------------------


def test_many_predictions_factorise_once(monkeypatch):
    bnn = make(functools.partial(AutoInducing, inducing_rows=4, inducing_cols=5), wide_net())
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a: calls.append(1) or cholesky(*a))
    outputs = bnn.predict(torch.randn(3, 20), num_predictions=20, aggregate=False)
    assert len(calls) == 2, "one for the rows and one for the columns of the one layer"
    assert outputs.std(0).min() > 0
    # What a draw is made from is not kept next to it.
    assert all(not name.startswith("joint(") for name in bnn._one_draw())


def test_predictions_have_the_posteriors_moments():
    bnn = make(build(), nn.Linear(2, 3).double())
    x, count = torch.randn(1, 2).double(), 300
    outputs = bnn.predict(x, num_predictions=count, aggregate=False)[:, 0]
    (q,) = bnn.net_guide.joints()
    mean = q.mean @ torch.cat([x[0], torch.ones(1).double()])
    error = outputs.std(0) / math.sqrt(count)
    assert bool(((outputs.mean(0) - mean).abs() < 6 * error).all())
    torch.testing.assert_close(bnn.predict(x, num_predictions=0, aggregate=False)[0, 0], mean)


SGD = functools.partial(torch.optim.SGD, lr=1e-3)


def moved_members(bnn):
    """Return which members have a gradient."""
    gradient = bnn.net_guide.u["locs.0.weight"].grad
    return gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist()


def members_that_train(bnn, batches, epochs):
    seen = []
    bnn.fit(batches, SGD, epochs, callback=lambda bnn, *_: seen.append(moved_members(bnn)))
    return seen


def test_members_take_turns_in_training_and_all_predict():
    options = {"q_inducing": "ensemble", "ensemble_size": 3, "max_lambda": 0.0}
    bnn, (x, y) = make(build(**options)), data()
    assert members_that_train(bnn, [(x, y)], 5) == [[0], [1], [2], [0], [1]]
    # Copies and loaded states go on from there.
    fresh = make(build(**options))
    fresh.load_checkpoint(torch.load(saved(bnn.checkpoint()), weights_only=True))
    for other in (copy.deepcopy(bnn), fresh, pickle.loads(pickle.dumps(bnn))):
        assert members_that_train(other, [(x, y)], 3) == [[2], [0], [1]]
    outputs = bnn.predict(x, num_predictions=6, aggregate=False)
    assert torch.equal(outputs[:3], outputs[3:])
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == 3


def test_particles_take_turns_too():
    bnn = make(build(q_inducing="ensemble", ensemble_size=3))
    bnn.fit([data()], SGD, 1, num_particles=2)
    assert moved_members(bnn) == [0, 1]


@pytest.mark.parametrize("handler", [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout])
def test_handlers_fall_back_to_plain_draws(handler):
    bnn, (x, _) = make(build()), data()
    torch.manual_seed(0)
    expected = bnn.predict(x, num_predictions=2, aggregate=False)
    torch.manual_seed(0)
    with pytest.warns(tyxe.TyxeWarning, match="had no effect: no site met inside it"), handler():
        assert torch.equal(bnn.predict(x, num_predictions=2, aggregate=False), expected)
    mixed = make(build(inducing_rows={"0.weight": 2, "2.weight": None}))
    with tyxe.poutine.report() as report, handler():
        mixed.predict(x, num_predictions=2)
    assert report.treatments("0.weight") == {"drawn"}
    assert report.treatments("2.weight") == {handler().treatment}


def test_other_wrappers_and_priors_take_it():
    x, y = data()
    module = tyxe.PytorchBNN(mlp().double(), STANDARD, build())
    ((module(x) - y).square().sum() + module.cached_kl_loss).backward()
    assert all(p.grad is not None for p in module.net_guide.parameters())
    bnn = make(build())
    posterior = bnn.net_guide.get_detached_distributions()
    assert all(isinstance(q, JointMarginal) for q in posterior.values())
    bnn.update_prior(DictPrior(posterior))
    # No closed form: log-densities at the draw. The prior is each layer's posterior over weight
    # and bias together, not its marginals.
    kl = elbo_terms(bnn.model, bnn.guide, x, y).kl
    torch.testing.assert_close(kl, torch.zeros_like(kl))
    assert bnn.fit([(x, y)], SGD, 2).loss


def test_a_net_that_is_traced():
    bnn = make(build())
    trace = poutine.trace(bnn.guide).get_trace()
    joint = trace.nodes["joint(net.0.weight, net.0.bias)"]
    assert joint["infer"]["is_auxiliary"]
    assert torch.equal(trace.nodes["net.0.bias"]["value"], joint["value"][:, -1])
    model = poutine.trace(poutine.replay(bnn.model, trace)).get_trace(*data())
    assert torch.equal(model.nodes["net.0.bias"]["value"], joint["value"][:, -1])


def test_factors_that_fail_stop_the_fit_with_the_parameters_named():
    bnn = make(build())
    with torch.no_grad():
        bnn.net_guide.row_maps["0.weight"].fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"non-finite draws of .*net.0.weight"):
        bnn.fit([data()], SGD, 1)
