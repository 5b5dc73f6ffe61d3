"""Binary weights: contract, starts, priors, training and prediction, relaxed and packed samples."""

import contextlib
import copy
import functools
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.binary import (
    ADAM,
    EXACT,
    Noise,
    data,
    disturb_,
    fit,
    kl_of,
    make,
    mlp,
    states_differ,
    weights,
)
from tyxe.bnn import elbo_terms
from tyxe.bnn.passes import ReplayedDraws
from tyxe.distributions import SignedBernoulli
from tyxe.errors import TyxeWarning
from tyxe.guides import AutoBernoulli, PretrainedInitializer, init_to_zero
from tyxe.poutine import flipout, local_reparameterization, report
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior
from tyxe.priors.sites import SitePriors
from tyxe.testing import check_guide


@pytest.mark.parametrize(
    "prior",
    [
        BinaryPrior(scale="radford"),
        BinaryPrior(delta=1e-3, scale=0.5),
        IIDPrior(SignedBernoulli(0.7)),
    ],
    ids=["rescaled", "beta", "iid"],
)
def test_contract(prior):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    check_guide(AutoBernoulli, SitePriors(prior.sites(net), net))


def test_the_two_values_are_part_of_the_state():
    for other, message in (
        ({"scale": "radford"}, r"AutoBernoulli\(1\) here and AutoBernoulli\(0\.3535"),
        ({"delta": 0.1}, r"SignedBernoulli.* here and .*SignedBetaBernoulli"),
    ):
        with pytest.raises(RuntimeError, match=message):
            make().load_state_dict(make(weights(**other)).state_dict())


def test_a_saved_delta_is_loaded():
    bnn = disturb_(make(weights(delta=0.1)))
    expected, other = kl_of(bnn), make(weights(delta=0.5))
    other.load_state_dict(bnn.state_dict())
    assert kl_of(other) == expected > 0


# --- where logits start -------------------------------------------------------------------------


def mean_of(bnn, name="net.0.weight"):
    return bnn.net_guide.posterior()[name].mean


def test_means_start_at_the_nets_own_weights():
    net = mlp()
    bnn = make(net=net)
    for name in ("0.weight", "3.weight"):
        own = net.get_parameter(name)
        torch.testing.assert_close(mean_of(bnn, f"net.{name}"), own, **EXACT)
        torch.testing.assert_close(bnn.net_guide.get_logits(name), 2 * torch.atanh(own), **EXACT)
    with torch.no_grad():
        net[0].weight[0, 0] = 7.0
    rescaled = make(weights(scale="radford"), net=net)
    assert rescaled.net_guide.posterior()["net.0.weight"].base_dist.scale == 4**-0.5
    limit = 0.99 * 4**-0.5
    torch.testing.assert_close(mean_of(rescaled), net[0].weight.clamp(-limit, limit), **EXACT)


def test_means_start_elsewhere_on_request():
    trained = mlp()
    start = functools.partial(AutoBernoulli, init=PretrainedInitializer.from_net(trained))
    torch.testing.assert_close(mean_of(make(guide=start)), trained[0].weight, **EXACT)
    steeper = make(weights(scale=0.5), functools.partial(start, init_gain=3.0)).net_guide
    logits = steeper.get_logits("net.0.weight")
    torch.testing.assert_close(logits, 6 * trained[0].weight, **EXACT)
    zero = make(guide=functools.partial(AutoBernoulli, init=init_to_zero))
    assert zero.net_guide.get_logits("0.weight").abs().max() == 0
    of_no_net = AutoBernoulli(Noise(), init=init_to_zero)
    assert of_no_net.median()["likelihood.sign"].item() == 1.0


# --- posterior to prior -------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [None, 0.1])
def test_a_posterior_that_became_the_prior_has_no_kl(delta):
    bnn = disturb_(make(weights(delta=delta, scale="radford")))
    expected = 0.0
    for q in (q.base_dist for q in bnn.net_guide.posterior().values()):
        kl = math.log(2) - q.entropy()
        if delta is not None:
            kl = -delta * (q.probs * (1 - q.probs)).log()
        expected += kl.sum().item()
    assert kl_of(bnn) == pytest.approx(expected, rel=1e-8)
    bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert kl_of(bnn) == 0
    disturb_(bnn)
    assert kl_of(bnn) > 0.1
    fit(bnn)


@pytest.mark.parametrize(
    "other", [dist.Normal(0.0, 1.0), dist.Bernoulli(0.5), SignedBernoulli(0.0, scale=0.5)]
)
def test_a_prior_of_other_values_does_not_replace_it(other):
    bnn = make()
    before = kl_of(bnn)
    with pytest.raises(ValueError, match=r"new prior of '0.weight' .* another support"):
        bnn.update_prior(IIDPrior(other))
    assert kl_of(bnn) == before


# --- training -----------------------------------------------------------------------------------


DRAWN = r"a value of 'net\.{}' was drawn, .*local_reparameterization\(\) spare the draw"
NO_RSAMPLE = r"'net.0.weight', Independent, has no rsample.*with tyxe\.poutine\.local_reparam"


@pytest.mark.parametrize(
    ("handler", "message"),
    [(contextlib.nullcontext, NO_RSAMPLE), (flipout, DRAWN.format("0.weight"))],
)
def test_training_needs_the_handler(handler, message):
    bnn = make()
    before = copy.deepcopy(bnn.state_dict())
    with pytest.raises(ValueError, match=message), handler():
        bnn.fit([data()], ADAM, 1)
    assert states_differ(bnn, before) == []
    module = tyxe.PytorchBNN(mlp(), weights(), AutoBernoulli)
    with pytest.raises(ValueError, match=message), handler():
        module(data()[0])


@pytest.mark.parametrize(
    ("net", "site", "x"),
    [
        (mlp(), "1.weight", torch.randn(5, 4).double()),
        (nn.LSTM(4, 2), "weight_ih_l0", torch.randn(3, 4)),
        (nn.Embedding(6, 2), "weight", torch.arange(5)),
    ],
    ids=["norm", "lstm", "embedding"],
)
def test_uses_that_the_handler_does_not_treat_are_errors(net, site, x):
    bnn = tyxe.PytorchBNN(net, BinaryPrior(), AutoBernoulli)
    with pytest.raises(ValueError, match=DRAWN.format(site)), local_reparameterization():
        bnn(x)
    with torch.no_grad():
        bnn.eval()(x)
    bnn = tyxe.PytorchBNN(net, BinaryPrior(), functools.partial(AutoBernoulli, relaxed=0.5))
    with pytest.warns(TyxeWarning, match="were sampled plainly"), local_reparameterization():
        outputs = bnn(x)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    (first.square().sum() + bnn.cached_kl_loss).backward()
    assert all(bool((p.grad != 0).any()) for p in bnn.net_guide.parameters())


def test_a_held_sample_has_no_gradient_but_can_be_predicted_with():
    bnn = tyxe.PytorchBNN(mlp(), weights(), AutoBernoulli)
    x, _ = data()
    refused = pytest.raises(ValueError, match=r"hold_sample")
    with refused, local_reparameterization(), bnn.hold_sample():
        bnn(x)
    with torch.no_grad(), bnn.hold_sample():
        assert torch.equal(bnn.eval()(x), bnn(x))


def test_a_sampled_kl_is_refused():
    with pytest.raises(ValueError, match=r"'net.0.weight' is discrete.*closed_form_kl=True"):
        fit(make(), closed_form_kl=False)


def test_everything_else_stays_deterministic_and_is_trained():
    bnn = make()
    kinds = bnn._parameter_kinds()
    fixed = {"net.0.bias", "net.1.weight", "net.1.bias", "net.3.bias"}
    assert {n for n, k in kinds.items() if k == "deterministic"} == fixed
    before = copy.deepcopy(bnn.state_dict())
    with report() as rows:
        fit(bnn)
    assert rows.treatments("0.weight") == rows.treatments("3.weight") == {"moments"}
    trained = set(kinds) | {"net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked"}
    assert set(states_differ(bnn, before)) == trained


def test_the_objective_without_gradients_may_draw():
    bnn, (x, y) = disturb_(make()), data()
    bnn.eval()
    with torch.no_grad():
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
        assert {float(v) for value in terms.values.values() for v in value.flatten()} == {-1.0, 1.0}
        expected = bnn.likelihood.log_likelihood(bnn._run_net(terms.values, x), y, "sum")
    torch.testing.assert_close(terms.data, expected, **EXACT)


def test_the_exact_posterior_of_an_orthogonal_design_is_the_optimum(monkeypatch):
    # For X^T X diagonal the posterior of signs factorises: with w_i^2 = 1, what is left of the
    # log-likelihood is w^T X^T y / sd^2, so phi = phi0 + 2 s X^T y / sd^2.
    sd, scale, phi0 = 0.8, 0.5, 0.25
    x = torch.linalg.qr(torch.randn(12, 3).double()).Q * torch.tensor([1.0, 2.0, 0.5])
    y = torch.randn(12, 1).double()
    bnn = make(
        IIDPrior(SignedBernoulli(phi0, scale)),
        net=nn.Linear(3, 1, bias=False).double(),
        likelihood=tyxe.likelihoods.HomoskedasticGaussian(12, scale=sd),
    )
    posterior = phi0 + 2 * scale * (x.T @ y).T / sd**2
    (logits,) = bnn.net_guide.parameters()

    def gradient():
        # Noise of 1 and -1 integrates a quadratic, as a Gaussian log-likelihood is.
        objective = 0
        for noise in (1.0, -1.0):
            with monkeypatch.context() as patch, local_reparameterization():
                patch.setattr(torch, "randn_like", lambda t, noise=noise: torch.full_like(t, noise))
                terms = elbo_terms(bnn.model, bnn.guide, x, y)
            objective = objective + (terms.data - terms.kl) / 2
        return torch.autograd.grad(objective, logits)[0]

    assert gradient().abs().max() > 1e-2
    with torch.no_grad():
        logits.copy_(posterior)
    assert gradient().abs().max() < 1e-10


# --- relaxed draws ------------------------------------------------------------------------------


def test_relaxed_training_needs_no_handler_and_predicts_two_values():
    bnn = make(weights(scale=0.5), functools.partial(AutoBernoulli, relaxed=0.4))
    draws = bnn.guide()
    assert all(v.requires_grad and bool((v.abs() < 0.5).all()) for v in draws.values())
    with torch.no_grad():
        discrete = bnn.net_guide.posterior()
    expected = sum(math.log(2) * q.event_shape.numel() - q.entropy() for q in discrete.values())
    kl = elbo_terms(bnn.model, bnn.guide, *data()).kl
    torch.testing.assert_close(kl, expected, **EXACT)
    before = copy.deepcopy(bnn.net_guide.state_dict())
    history = bnn.fit([data()], ADAM, 3)
    assert all(map(math.isfinite, history.loss))
    assert not torch.equal(bnn.net_guide.get_logits("0.weight"), before["logits.0.weight"])
    with torch.no_grad():
        for value in bnn._one_draw().values():
            assert value.abs().unique().tolist() == [0.5]
    for q in bnn.net_guide.get_detached_distributions().values():
        assert type(q.base_dist) is SignedBernoulli


# --- prediction ---------------------------------------------------------------------------------


def test_predictions_outside_the_handler_use_the_two_values():
    bnn, (x, _) = disturb_(make(weights(scale="radford"))), data()
    bnn.eval()
    found = []
    for vectorize in (False, True):
        torch.manual_seed(1)
        found.append(bnn.predict(x, num_predictions=3, aggregate=False, vectorize=vectorize))
    torch.manual_seed(1)
    draws = list(ReplayedDraws().over(bnn._draws(3)))
    assert draws[0]["net.0.weight"].abs().unique().tolist() == [4**-0.5]
    with torch.no_grad():
        expected = torch.stack([bnn._run_net(values, x) for values in draws])
    for outputs in found:
        torch.testing.assert_close(outputs, expected, **EXACT)
    with local_reparameterization():
        assert bnn.predict(x, num_predictions=3, aggregate=False).shape == (3, 30, 3)


def test_the_centre_is_the_likelier_value():
    bnn, (x, _) = disturb_(make(weights(scale=0.2))), data()
    for site, value in bnn.net_guide.median().items():
        expected = 0.2 * bnn.net_guide.get_logits(site).sign()
        torch.testing.assert_close(value, expected, **EXACT)
    with torch.no_grad():
        expected = bnn.to_module()(x).log_softmax(-1)
    torch.testing.assert_close(bnn.predict(x, num_predictions=0), expected, **EXACT)
    assert bnn.to_module(sample=True)[0].weight.abs().unique().tolist() == [0.2]


def test_large_logits_are_no_collapse():
    # Standard deviations of 1e-22: for Normals a warning.
    bnn = make(weights(delta=0.0), functools.partial(AutoBernoulli, init_gain=1e3))
    assert all(map(math.isfinite, fit(bnn, beta=1e-3).loss))


# --- packed samples -----------------------------------------------------------------------------


def test_packed_samples_are_draws_at_a_bit_each():
    bnn = disturb_(make(weights(scale="radford")))
    torch.manual_seed(1)
    packed = bnn.net_guide.pack(9)
    torch.manual_seed(1)
    with torch.no_grad():
        posterior = bnn.net_guide.posterior()
        expected = {name: q.sample((9,)) for name, q in posterior.items()}
    assert len(packed) == 9
    # 32 and 24 weights, against 4 bytes or 8 for each.
    assert packed.num_bytes == 9 * (4 + 3)
    for one in (packed, pickle.loads(pickle.dumps(packed))):
        for s, values in enumerate(one):
            assert all(torch.equal(value, expected[name][s]) for name, value in values.items())
