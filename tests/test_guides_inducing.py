"""The inducing-weights guide: contract, sizes, objective, prediction, pruning, counts."""

import copy
import functools
import io
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
from tyxe.bnn import elbo_terms
from tyxe.distributions import JointDistribution, JointMarginal, SiteProduct
from tyxe.distributions.inducing_formulas import conditional_divergence
from tyxe.guides import (
    AutoInducing,
    AutoNormal,
    AutoRadial,
    Guide,
    InducingOptions,
    parameter_count,
    prune_,
    prune_inducing_,
)
from tyxe.priors import DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior, SitePriors
from tyxe.testing import check_guide

STANDARD = IIDPrior(dist.Normal(0.0, 1.0))
FAMILIES = ["diagonal", "full", "matrix", "ensemble"]
SMALL = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
# Scales at which finite differences resolve what the small starts would hide.
WIDE = {"init_residual": 0.3, "init_lambda": 0.3}


def program(net, prior=STANDARD):
    return SitePriors(prior.sites(net), net)


def mlp():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def wide_net():
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2))


def make(builder, net=None, prior=STANDARD, size=10):
    net = mlp().double() if net is None else net
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(size, scale=0.5)
    return tyxe.VariationalBNN(net, prior, likelihood, builder)


def build(**keywords):
    return functools.partial(AutoInducing, **{**SMALL, **WIDE, **keywords})


def data(n=10, inputs=2, outputs=1):
    return torch.randn(n, inputs).double(), torch.randn(n, outputs).double()


# --- contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"whitened": False},
        {"inducing_rows": 4, "inducing_cols": 5},
        {"inducing_rows": 4, "inducing_cols": 5, "whitened": False},
        {"hierarchical": (2, 1)},
        {"max_lambda": 0.5, "max_scale_u": 0.4},
        {"inducing_rows": {"0.weight": 2, "2.weight": None}, "everywhere": False},
    ],
    ids=lambda k: ",".join(k) or "plain",
)
def test_contract(family, keywords):
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
    assert [layer.matrix.shape for layer in guide.layers] == [(4, 13), (3, 16)]
    assert {s.own_name for s in guide.rest.sites} == {"b.bias", "c.weight", "c.bias"}


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


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"inducing_rows": 0}, ValueError, "inducing_rows is 0 for '0.weight'; expected at least"),
        ({"inducing_cols": -3}, ValueError, "inducing_cols is -3 for '0.weight'"),
        ({"inducing_rows": 1.5}, ValueError, "a float is a fraction, above 0 and up to 1"),
        ({"inducing_rows": 0.0}, ValueError, "a float is a fraction"),
        ({"inducing_rows": float("nan")}, ValueError, "a float is a fraction"),
        ({"inducing_rows": True}, TypeError, "expected an integer, or a fraction"),
        ({"inducing_rows": "2"}, TypeError, "expected an integer, or a fraction"),
        ({"inducing_rows": None}, TypeError, "expected an integer, or a fraction"),
        ({"inducing_rows": {"0.weight": 2}}, ValueError, "inducing_rows has no size for 2.weight"),
        ({"inducing_rows": {"1.weight": 2}}, ValueError, "no site '1.weight'; the sites are 0.we"),
        (
            {"inducing_cols": {"0.weight": 2, "2.weight": 5}, "everywhere": False},
            ValueError,
            "inducing_cols is 5 for '2.weight', which has only 4; take at most that, or say every",
        ),
        ({"q_inducing": "low_rank"}, ValueError, "q_inducing is 'low_rank'; expected one of 'diag"),
        ({"ensemble_size": 0}, ValueError, "ensemble_size is 0; expected at least 1"),
        ({"dataset_size": 0}, ValueError, "dataset_size is 0"),
        ({"init_lambda": 0.0}, ValueError, "init_lambda is 0.0; expected positive"),
        ({"init_lambda": 0.2, "max_lambda": 0.1}, ValueError, "is not below max_lambda 0.1"),
        ({"max_lambda": -1.0}, ValueError, "max_lambda is -1.0; expected 0 or a positive"),
        ({"max_scale_u": 0.0}, ValueError, "max_scale_u is 0.0; expected a positive number"),
        ({"init_scale_u": 0.5, "max_scale_u": 0.1}, ValueError, "is not below max_scale_u 0.1"),
        ({"hierarchical": (1, 1), "whitened": False}, ValueError, "stack whitened ones"),
        ({"hierarchical": (5, 1)}, ValueError, r"from 1 to the stack's size \(4, 2\)"),
        ({"hierarchical": (0, 1)}, ValueError, r"hierarchical is \(0, 1\)"),
        (
            {"hierarchical": (1, 1), "inducing_cols": {"0.weight": 2, "2.weight": 3}},
            ValueError,
            "needs as many columns; inducing_cols gives 0.weight: 2, 2.weight: 3",
        ),
        ({"q_induced": 3}, TypeError, "q_induced"),
        ({"options": InducingOptions(), "max_lambda": 0.1}, TypeError, "given besides options"),
    ],
)
def test_bad_arguments(keywords, error, match):
    with pytest.raises(error, match=match):
        AutoInducing(program(mlp()), **{**SMALL, **keywords})


def test_the_rest_needs_a_guide_of_ours():
    with pytest.raises(
        TypeError, match=r"mean_field built a AutoDelta; expected one of tyxe.guide"
    ):
        AutoInducing(
            program(nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9))),
            2,
            2,
            mean_field=pyro.infer.autoguide.AutoDelta,
        )


@pytest.mark.parametrize(
    "prior",
    [
        dist.Normal(0.1, 1.0),
        dist.Laplace(0.0, 1.0),
        dist.LogNormal(0.0, 1.0),
        dist.StudentT(3.0, 0.0, 1.0),
    ],
    ids=lambda p: type(p).__name__,
)
def test_another_prior_is_refused_with_the_site_named(prior):
    def by_site(name, module, param):
        base = prior if name == "2.bias" else dist.Normal(0.0, 1.0)
        return base.expand(param.shape)

    with pytest.raises(ValueError, match=r"each site, which '2.bias' has not"):
        AutoInducing(program(mlp(), LambdaPrior(by_site)), **SMALL)
    sizes = {"0.weight": 2, "2.weight": None}
    AutoInducing(program(mlp(), LambdaPrior(by_site)), sizes, 2)


def test_priors_of_different_scales():
    guide = AutoInducing(program(mlp().double(), LayerwiseNormalPrior("radford")), **SMALL)
    scales = [layer.matrix.prior_scales for layer in guide.layers]
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
        guide.u.distributions()["0.weight"].variance_through(None, None), torch.full((4, 5), 1e-3)
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
    variance = guide.u.distributions()["0.weight"].variance_through(None, None)
    assert 0.0099 < variance.min() <= variance.max() <= 0.0100001


@pytest.mark.parametrize("family", ["full", "matrix"])
def test_caps_of_covariances(family):
    guide = AutoInducing(program(wide_net()), 4, 5, q_inducing=family, max_scale_u=0.1)
    with torch.no_grad():
        for name, parameter in guide.u.named_parameters():
            parameter.add_(20.0 if name.startswith("scales") else torch.randn_like(parameter))
    variance = guide.u.distributions()["0.weight"].variance_through(None, None)
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


def test_options_may_come_as_one():
    options = InducingOptions(everywhere=True, max_lambda=0.1)
    guide = AutoInducing(program(mlp()), 2, 2, options=options)
    assert guide.options.max_lambda == 0.1
    assert guide.rest is None


# --- the objective --------------------------------------------------------------------------------


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


def test_the_kl_bounds_that_of_the_weights_alone():
    bnn = make(build(inducing_rows=1, inducing_cols=1))
    (first, _), prior = list(bnn.net_guide.joints()), dict(bnn.net_prior.priors())
    with torch.no_grad():
        samples = first.sample((4000,))
        parts = first.separate(samples)
        logs = first.log_prob(samples) - sum(
            prior[name.removeprefix("net.")].log_prob(value) for name, value in parts.items()
        )
        error = logs.std() / math.sqrt(len(logs))
        assert 0 < logs.mean() < first.kl_from_prior() + 6 * error


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
    expected = min(1.0, 2 / 3) * divergence + q.u.kl(None, None)
    torch.testing.assert_close(q.kl_from_prior(), expected)
    (q,) = AutoInducing(program(nn.Linear(2, 3)), **SMALL, dataset_size=100).joints()
    assert q.weight == 1.0


def test_max_lambda_zero_is_a_function_of_u():
    bnn = make(build(max_lambda=0.0, q_inducing="ensemble", ensemble_size=1))
    draws = [bnn.net_guide()["net.0.weight"] for _ in range(2)]
    assert torch.equal(*draws)
    assert bnn.net_guide.get_lambda("0.weight") == 0.0
    assert elbo_terms(bnn.model, bnn.guide, *data()).kl == 0.0


# --- training and prediction ----------------------------------------------------------------------


def toy():
    x = torch.linspace(-1, 1, 40)[:, None]
    return x, torch.cos(4 * x + 0.8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hierarchical", [None, (4, 4)])
def test_fitting_lowers_the_loss(family, hierarchical):
    x, y = toy()
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    builder = functools.partial(
        AutoInducing,
        inducing_rows=5,
        inducing_cols=5,
        everywhere=True,
        q_inducing=family,
        hierarchical=hierarchical,
    )
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(40, scale=0.2)
    prior = IIDPrior(dist.Normal(0.0, 2.0))
    bnn = tyxe.VariationalBNN(net, prior, likelihood, builder)
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=2e-2), 150)
    assert sum(history.loss[-10:]) < 0.5 * sum(history.loss[:10])
    assert all(p.grad is not None for p in bnn.net_guide.parameters())
    error, _ = bnn.evaluate(x, y, num_predictions=10, reduction="mean")
    assert error < y.var(correction=0)


def test_many_predictions_factorise_once(monkeypatch):
    bnn = make(functools.partial(AutoInducing, inducing_rows=4, inducing_cols=5), wide_net())
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a: calls.append(1) or cholesky(*a))
    outputs = bnn.predict(torch.randn(3, 20), num_predictions=20, aggregate=False)
    assert len(calls) == 2, "one for the rows and one for the columns of the one layer"
    assert outputs.std(0).min() > 0
    # What a draw is made from is not kept next to it.
    assert all(not name.startswith("joint(") for name in bnn.one_draw())


def test_predictions_have_the_posteriors_moments():
    bnn = make(build(), nn.Linear(2, 3).double())
    x, count = torch.randn(1, 2).double(), 4000
    outputs = bnn.predict(x, num_predictions=count, aggregate=False)[:, 0]
    (q,) = bnn.net_guide.joints()
    mean = q.mean @ torch.cat([x[0], torch.ones(1).double()])
    error = outputs.std(0) / math.sqrt(count)
    assert bool(((outputs.mean(0) - mean).abs() < 6 * error).all())
    torch.testing.assert_close(bnn.predict(x, num_predictions=0, aggregate=False)[0, 0], mean)


def test_members_take_turns_in_training_and_all_predict():
    bnn = make(build(q_inducing="ensemble", ensemble_size=3, max_lambda=0.0))
    x, y = data()
    members = bnn.net_guide.u.locs["0.weight"]
    seen = []

    def moved(bnn, epoch, loss):
        seen.append(members.grad.flatten(1).abs().sum(1).nonzero().flatten().tolist())

    bnn.fit([(x, y)], functools.partial(torch.optim.SGD, lr=1e-3), 5, callback=moved)
    assert seen == [[0], [1], [2], [0], [1]]
    # Copies and loaded states go on from there.
    other = copy.deepcopy(bnn)
    fresh = make(build(q_inducing="ensemble", ensemble_size=3, max_lambda=0.0))
    fresh.load_checkpoint(torch.load(saved(bnn.checkpoint()), weights_only=True))
    for following in (other, fresh, pickle.loads(pickle.dumps(bnn))):
        members, seen = following.net_guide.u.locs["0.weight"], []
        following.fit([(x, y)], functools.partial(torch.optim.SGD, lr=1e-3), 3, callback=moved)
        assert seen == [[2], [0], [1]]
    outputs = bnn.predict(x, num_predictions=6, aggregate=False)
    assert torch.equal(outputs[:3], outputs[3:])
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == 3


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_particles_take_turns_too():
    bnn = make(build(q_inducing="ensemble", ensemble_size=3))
    bnn.fit([data()], functools.partial(torch.optim.SGD, lr=1e-3), 1, num_particles=2)
    gradient = bnn.net_guide.u.locs["0.weight"].grad.flatten(1).abs().sum(1)
    assert (gradient > 0).tolist() == [True, True, False]


def test_a_resumed_fit_is_the_one_that_did_not_stop():
    x, y = data()
    optimizer = functools.partial(torch.optim.Adam, lr=1e-2)
    torch.manual_seed(0)
    straight = make(build(q_inducing="ensemble"))
    stopped = copy.deepcopy(straight)
    torch.manual_seed(1)
    straight.fit([(x, y)], optimizer, 4)
    torch.manual_seed(1)
    stopped.fit([(x, y)], optimizer, 2)
    file = saved(stopped.checkpoint())
    resumed = make(build(q_inducing="ensemble"))
    resumed.load_checkpoint(torch.load(file, weights_only=True))
    resumed.fit([(x, y)], optimizer, 2)
    for left, right in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def predicted_inside(bnn, handler, x):
    torch.manual_seed(0)
    with tyxe.poutine.report() as report, handler():
        return report, bnn.predict(x, num_predictions=2, aggregate=False)


@pytest.mark.parametrize("handler", [tyxe.poutine.local_reparameterization, tyxe.poutine.flipout])
def test_handlers_fall_back_to_plain_draws(handler):
    bnn = make(build())
    x, _ = data()
    with pytest.warns(tyxe.TyxeWarning, match="had no effect: no site met inside it has a poster"):
        report, inside = predicted_inside(bnn, handler, x)
    assert report.treatments("0.weight") == {"drawn"}
    torch.manual_seed(0)
    assert torch.equal(bnn.predict(x, num_predictions=2, aggregate=False), inside)
    mixed = make(build(inducing_rows={"0.weight": 2, "2.weight": None}))
    report, _ = predicted_inside(mixed, handler, x)
    assert report.treatments("0.weight") == {"drawn"}
    assert report.treatments("2.weight") != {"drawn"}


def test_other_wrappers_and_priors_take_it():
    x, y = data()
    bnn = tyxe.PytorchBNN(mlp().double(), STANDARD, build())
    loss = (bnn(x) - y).square().sum() + bnn.cached_kl_loss
    loss.backward()
    assert all(p.grad is not None for p in bnn.net_guide.parameters())
    bnn = make(build())
    posterior = bnn.net_guide.get_detached_distributions()
    assert all(isinstance(q, JointMarginal) for q in posterior.values())
    bnn.update_prior(DictPrior(posterior))
    # No closed form: log-densities at the draw.
    torch.manual_seed(0)
    terms = elbo_terms(bnn.model, bnn.guide, x, y)
    torch.manual_seed(0)
    sampled = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=False)
    torch.testing.assert_close(terms.kl, sampled.kl)
    # The prior is each layer's posterior over weight and bias together, not its marginals.
    torch.testing.assert_close(terms.kl, torch.zeros_like(terms.kl))
    assert bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-3), 2).loss


def test_linearising_is_refused_with_the_way_out():
    bnn = make(build())
    with pytest.raises(TypeError, match="the net cannot be linearised"):
        bnn.predict(data()[0], predictive="glm")


def test_a_net_that_is_traced():
    bnn = make(build())
    trace = poutine.trace(bnn.guide).get_trace()
    joint = trace.nodes["joint(net.0.weight, net.0.bias)"]
    assert joint["infer"]["is_auxiliary"]
    assert torch.equal(trace.nodes["net.0.bias"]["value"], joint["value"][:, -1])
    model = poutine.trace(poutine.replay(bnn.model, trace)).get_trace(*data())
    assert torch.equal(model.nodes["net.0.bias"]["value"], joint["value"][:, -1])


# --- pruning ------------------------------------------------------------------------------------


def test_pruned_maps_stay_pruned():
    x, y = data(inputs=20, outputs=2)
    builder = functools.partial(AutoInducing, inducing_rows=4, inducing_cols=5)
    bnn = make(builder, wide_net().double())
    guide = bnn.net_guide
    before, size = parameter_count(guide), 4 * 30 + 5 * 21
    entries = torch.cat(
        [guide.row_maps["0.weight"].flatten(), guide.column_maps["0.weight"].flatten()]
    )
    prune_inducing_(guide, keep=0.4)
    assert before - parameter_count(guide) == size - round(0.4 * size)
    kept = torch.cat(
        [guide.kept_rows["0.weight"].flatten(), guide.kept_columns["0.weight"].flatten()]
    )
    assert entries[kept].abs().min() >= entries[~kept].abs().max()
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-2), 30)
    assert history.loss[-1] < history.loss[0]
    for side, mask in enumerate((guide.kept_rows["0.weight"], guide.kept_columns["0.weight"])):
        assert bool((guide.map("0.weight", side)[~mask] == 0).all())
        assert bool((guide.map("0.weight", side)[mask] != 0).all())
    other = make(builder, wide_net().double())
    prune_inducing_(other.net_guide, keep=1.0)
    other.load_state_dict(bnn.state_dict())
    torch.manual_seed(0)
    left = bnn.predict(x, num_predictions=2, aggregate=False)
    torch.manual_seed(0)
    assert torch.equal(other.predict(x, num_predictions=2, aggregate=False), left)
    prune_inducing_(guide, keep=0.2)
    assert before - parameter_count(guide) == size - round(0.2 * size)
    with pytest.raises(ValueError, match="and no more than are left"):
        prune_inducing_(guide, keep=0.3)


def test_rows_of_which_nothing_is_left():
    guide = AutoInducing(program(wide_net()), 4, 5)
    with torch.no_grad():
        guide.row_maps["0.weight"][1] = 1e-9
    prune_inducing_(guide, keep=0.8)
    assert not guide.kept_rows["0.weight"][1].any()
    assert bool(guide()["net.0.weight"].isfinite().all())


def test_pruned_mean_fields():
    x, y = data(inputs=20, outputs=2)
    bnn = make(functools.partial(AutoNormal, init_scale=0.1), wide_net().double())
    guide = bnn.net_guide
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(torch.randn_like(parameter))
    ratios = torch.cat(
        [(guide.get_loc(n).abs() / guide.get_scale(n)).flatten() for n in ("0.weight", "2.weight")]
    )
    before = parameter_count(guide)
    prune_(guide, keep=0.1)
    assert before - parameter_count(guide) == 2 * (660 - 66)
    kept = torch.cat([guide.kept[n].flatten() for n in ("0.weight", "2.weight")])
    assert ratios[kept].min() >= ratios[~kept].max()
    assert "0.bias" not in guide.kept
    for handler in (tyxe.poutine.local_reparameterization, tyxe.poutine.flipout):
        with tyxe.poutine.report() as report, handler():
            history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-2), 30)
        assert history.loss[-1] < history.loss[0]
        assert "drawn" not in report.treatments("0.weight")
    assert bool((guide()["net.0.weight"][~guide.kept["0.weight"]] == 0).all())
    check_guide(pruned_mean_field)


def test_a_pruned_net_linearised():
    bnn = make(pruned_mean_field, nn.Linear(3, 2).double())
    x = torch.randn(4, 3).double()
    _, scale = bnn.predict(x, predictive="glm")
    variances = {n: q.variance for n, q in bnn.net_guide.posterior().items()}
    assert int((variances["net.weight"] == 0).sum()) == 3
    expected = x.square() @ variances["net.weight"].mT + variances["net.bias"] + 0.5**2
    torch.testing.assert_close(scale.square(), expected.detach())


def pruned_mean_field(module):
    guide = AutoNormal(module)
    with torch.no_grad():
        for _, loc in guide.locs.items():
            loc.add_(torch.linspace(1, 2, loc.numel()).to(loc).view(loc.shape))
    prune_(guide, keep=0.5)
    return guide


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.1, 5, float("nan"), True, "half", 1e-9])
def test_shares_out_of_range(keep):
    guide = AutoInducing(program(wide_net()), 4, 5)
    for function, target in ((prune_inducing_, guide), (prune_, guide.rest)):
        state = copy.deepcopy(target.state_dict())
        with pytest.raises(ValueError, match="keep is"):
            function(target, keep)
        assert list(target.state_dict()) == list(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bnn: pickle.loads(pickle.dumps(bnn))])
def test_copies_are_pruned_and_fitted_on(copied):
    """A copy's supports are other objects; and a site of which nothing is left has not exploded."""
    net = nn.Sequential(nn.Linear(20, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    x, y = data(inputs=20)
    bnn = copied(make(functools.partial(AutoNormal, init_scale=0.1), net))
    with torch.no_grad():
        bnn.net_guide.locs["0.weight"].fill_(1.0)
    prune_(bnn.net_guide, keep=0.5)
    assert not bool(bnn.net_guide.kept["1.weight"].any())
    bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-3), 2)


def test_pruning_another_guide():
    with pytest.raises(TypeError, match=r"prune_ takes tyxe.guides.AutoNormal"):
        prune_(AutoRadial(program(mlp())), 0.5)
    with pytest.raises(TypeError, match=r"prune_inducing_ takes tyxe.guides.AutoInducing"):
        prune_inducing_(AutoNormal(program(mlp())), 0.5)


# --- counts -------------------------------------------------------------------------------------

NORMS = 53_120  # parameters of the norms, which are not random
COUNTS = {
    "diagonal": [1_384_662, 2_771_446, 5_710_902, 12_253_366, 27_992_502],
    "ensemble": [1_426_134, 2_937_334, 6_374_454, 14_907_574, 38_609_334],
}


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
    for m in (16, 32, 64, 128, 256):
        guide = AutoInducing(resnet, m, m, q_inducing=family, ensemble_size=5, everywhere=True)
        found.append(NORMS + parameter_count(guide))
    assert found == COUNTS[family]


def test_counts_of_a_pruned_resnet(resnet):
    guide = AutoInducing(resnet, 64, 64, everywhere=True)
    found = []
    for keep in (0.75, 0.5, 0.25):
        prune_inducing_(guide, keep)
        found.append(NORMS + parameter_count(guide))
    assert found == [4_408_790, 3_106_678, 1_804_566]


def test_counts_of_a_pruned_mean_field(resnet):
    guide = AutoNormal(resnet, init_loc_fn=tyxe.guides.init_to_sample)
    found = [NORMS + parameter_count(guide)]
    for keep in (0.5, 0.1, 0.01):
        prune_(guide, keep)
        found.append(NORMS + parameter_count(guide))
    assert found == [46_988_564, 23_520_852, 4_746_682, 522_494]


# --- posteriors over several sites, of any kind ---------------------------------------------------


class FullLayer(JointDistribution):
    """A full covariance over weight and bias of one linear layer."""

    def __init__(self, loc, scale_tril):
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__(("net.weight", "net.bias"), loc.shape)

    @property
    def normal(self):
        return torch.distributions.MultivariateNormal(self.loc, scale_tril=self.scale_tril)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return self.normal.variance

    def rsample(self, sample_shape=()):
        return self.normal.rsample(sample_shape)

    def log_prob(self, value):
        return self.normal.log_prob(value)

    def separate(self, value):
        return {"net.weight": value[..., :-1].unsqueeze(-2), "net.bias": value[..., -1:]}

    def marginal_log_prob(self, name, value):
        own = slice(0, -1) if name == "net.weight" else slice(-1, None)
        covariance = self.normal.covariance_matrix[own, own]
        flat = value.flatten(-2) if name == "net.weight" else value
        return torch.distributions.MultivariateNormal(self.loc[own], covariance).log_prob(flat)


class RegisteredLayer(FullLayer):
    """The same with a closed form."""


@torch.distributions.register_kl(RegisteredLayer, SiteProduct)
def _kl(q, p):
    scales = [p.priors[name].stddev.reshape(-1) for name in q.names]
    prior = torch.distributions.MultivariateNormal(
        torch.zeros_like(q.loc), scale_tril=torch.diag(torch.cat(scales))
    )
    return torch.distributions.kl_divergence(q.normal, prior)


class AutoFullLayer(Guide):
    """A guide of one joint posterior."""

    kind_of_joint = FullLayer

    def __init__(self, module):
        super().__init__(module)
        self.loc = nn.Parameter(torch.zeros(3).double())
        self.scale = nn.Parameter(torch.eye(3).double())

    def joints(self):
        return [self.kind_of_joint(self.loc, self.scale.tril())]

    def site_distribution(self, site):
        raise NotImplementedError


class AutoRegisteredLayer(AutoFullLayer):
    """The same with a closed form."""

    kind_of_joint = RegisteredLayer


def test_contract_of_a_joint_posterior_of_ones_own():
    check_guide(AutoFullLayer, program(nn.Linear(2, 1).double()))


def test_a_joint_posterior_with_a_closed_form_finds_the_exact_posterior():
    x, y = data(20)
    prior = IIDPrior(dist.Normal(0.0, 2.0))
    bnn = make(AutoRegisteredLayer, nn.Linear(2, 1).double(), prior, size=20)
    inputs = torch.cat([x, torch.ones(20, 1).double()], 1)
    precision = inputs.mT @ inputs / 0.5**2 + torch.eye(3).double() / 4
    covariance = torch.linalg.inv(precision)
    mean = covariance @ inputs.mT @ y[:, 0] / 0.5**2
    guide = bnn.net_guide
    with torch.no_grad():
        guide.loc.copy_(mean)
        guide.scale.copy_(torch.linalg.cholesky(covariance))
    # At the posterior the ELBO of a draw, with log-densities, is the evidence whatever the draw.
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(20).double(), 4 * inputs @ inputs.mT + 0.25 * torch.eye(20).double()
    ).log_prob(y[:, 0])
    for _ in range(3):
        terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=False)
        torch.testing.assert_close(terms.data - terms.kl, evidence, rtol=1e-8, atol=1e-8)
    # So is, on average, that with the closed form: its error is that of the data term alone.
    draws = [elbo_terms(bnn.model, bnn.guide, x, y) for _ in range(400)]
    assert len({terms.kl.item() for terms in draws}) == 1
    elbos = torch.stack([terms.data - terms.kl for terms in draws]).detach()
    assert abs(elbos.mean() - evidence) < 6 * elbos.std() / math.sqrt(len(elbos))


def test_factors_that_fail_stop_the_fit_with_the_parameters_named():
    bnn = make(build())
    with torch.no_grad():
        bnn.net_guide.row_maps["0.weight"].fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"non-finite draws of .*net.0.weight"):
        bnn.fit([data()], functools.partial(torch.optim.Adam, lr=1e-3), 1)
