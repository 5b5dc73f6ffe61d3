"""Training and predicting with inducing weights, and the handlers and wrappers around it."""

import copy
import functools
import math
import pickle

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.inducing import STANDARD, build, data, make, mlp, saved, wide_net
from tyxe.bnn import elbo_terms
from tyxe.distributions import JointMarginal
from tyxe.guides import AutoInducing
from tyxe.priors import DictPrior, IIDPrior


def toy():
    x = torch.linspace(-1, 1, 40)[:, None]
    return x, torch.cos(4 * x + 0.8)


@pytest.mark.parametrize(
    ("family", "hierarchical"), [("full", None), ("ensemble", None), ("matrix", (4, 4))]
)
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
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=3e-2), 150)
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
    assert all(not name.startswith("joint(") for name in bnn._one_draw())


def test_predictions_have_the_posteriors_moments():
    bnn = make(build(), nn.Linear(2, 3).double())
    x, count = torch.randn(1, 2).double(), 1000
    outputs = bnn.predict(x, num_predictions=count, aggregate=False)[:, 0]
    (q,) = bnn.net_guide.joints()
    mean = q.mean @ torch.cat([x[0], torch.ones(1).double()])
    error = outputs.std(0) / math.sqrt(count)
    assert bool(((outputs.mean(0) - mean).abs() < 6 * error).all())
    torch.testing.assert_close(bnn.predict(x, num_predictions=0, aggregate=False)[0, 0], mean)


def test_members_take_turns_in_training_and_all_predict():
    bnn = make(build(q_inducing="ensemble", ensemble_size=3, max_lambda=0.0))
    x, y = data()
    members = bnn.net_guide.u["locs.0.weight"]
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
        members, seen = following.net_guide.u["locs.0.weight"], []
        following.fit([(x, y)], functools.partial(torch.optim.SGD, lr=1e-3), 3, callback=moved)
        assert seen == [[2], [0], [1]]
    outputs = bnn.predict(x, num_predictions=6, aggregate=False)
    assert torch.equal(outputs[:3], outputs[3:])
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == 3


def test_particles_take_turns_too():
    bnn = make(build(q_inducing="ensemble", ensemble_size=3))
    bnn.fit([data()], functools.partial(torch.optim.SGD, lr=1e-3), 1, num_particles=2)
    gradient = bnn.net_guide.u["locs.0.weight"].grad.flatten(1).abs().sum(1)
    assert (gradient > 0).tolist() == [True, True, False]


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
        bnn.fit([data()], functools.partial(torch.optim.Adam, lr=1e-3), 1)
