"""Fitting, saving and reassigning a Laplace approximation."""

import functools
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tests.oracles.bnns import NORMAL, mlp
from tests.oracles.laplace import STRUCTURES, classifier, fitted, regression
from tests.oracles.rejections import rejects

pytestmark = pytest.mark.usefixtures("double")


def precision_of(bnn):
    return bnn.net_guide.precision.to_dense()


def test_fit_finds_the_mode_and_its_curvature():
    bnn, x, y, _, precision, mean = regression()
    start = tyxe.LaplaceBNN(nn.Linear(3, 1), bnn.prior, bnn.likelihood, structure="full")
    history = start.fit([(x, y)], functools.partial(torch.optim.Adam, lr=5e-2), 500)
    found = start._mean_values()
    torch.testing.assert_close(found["net.weight"], mean[:3].mT, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(precision_of(start), precision, rtol=1e-9, atol=1e-8)
    prior = td.Normal(0.0, 1.3)
    density = sum(prior.log_prob(value).sum() for value in found.values())
    assert math.isclose(history.kl[-1], -float(density), rel_tol=1e-4)


def test_augmented_passes_are_averaged():
    found = []
    for passes in (1, 3):
        bnn, x, y = classifier("full", num_passes=passes)
        bnn.fit_curvature([(x[:7], y[:7]), (x[7:], y[7:])])
        found.append(bnn.state.curvature.operator.to_dense())
    torch.testing.assert_close(*found)


def test_the_last_layer_alone():
    torch.manual_seed(1)
    net = mlp(3, 4, 3)
    x, y = torch.randn(15, 3), torch.randint(0, 3, (15,))
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), expose_all=False, expose_modules=[net[2]])
    bnn = tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(15), structure="full")
    bnn.fit_curvature([(x, y)])
    assert bnn.net_guide.precision.size == 15
    features = net[:2](x).detach()
    probs = net(x).softmax(-1).detach()
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    a = torch.cat([features, torch.ones(15, 1)], 1)
    expected = torch.einsum("ncd,ni,nj->cidj", hessian, a, a).reshape(15, 15) + torch.eye(15)
    torch.testing.assert_close(precision_of(bnn), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("saved", "built"), [(a, b) for a in STRUCTURES for b in STRUCTURES if a != b]
)
def test_a_state_of_another_structure_is_refused(saved, built):
    other, *_ = fitted(saved)
    new, (bnn, *_) = classifier(built)[0], fitted(built)
    message = f"curvature of structure='{saved}', but this BNN.*build it with structure='{saved}'"
    for one in (new, bnn):
        rejects(one, RuntimeError, message, lambda one=one: one.load_state_dict(other.state_dict()))
    assert new.net_guide.state is None
    assert bnn.net_guide.state is not None


def test_a_state_without_a_curvature_fits_every_structure():
    kron, *_ = classifier("kron")
    full, *_ = fitted("full")
    full.load_state_dict(kron.state_dict())
    assert full.net_guide.state is None


def test_without_linear_maps_the_diagonal_is_the_kronecker_structure():
    x, y = torch.randn(5, 3), torch.zeros(5).long()
    bnns = [
        tyxe.LaplaceBNN(nn.LayerNorm(3), NORMAL, tyxe.likelihoods.Categorical(5), structure=each)
        for each in ("kron", "diag")
    ]
    bnns[0].fit_curvature([(x, y)])
    bnns[1].load_state_dict(bnns[0].state_dict())
    torch.testing.assert_close(bnns[1].predict(x, link="probit"), bnns[0].predict(x, link="probit"))


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_temperature_that_is_assigned(structure, is_before):
    bnn, x, y = classifier(structure)
    if is_before:
        bnn.temperature = 0.3
    bnn.fit_curvature([(x, y)])
    bnn.fit_gp([(x, y)])
    bnn.predict(x, predictive="gp", link="probit")
    bnn.temperature = 0.3
    built, *_ = fitted(structure, temperature=0.3)
    built.fit_gp([(x, y)])
    for predictive in ("glm", "gp"):
        found = (one.predict(x, predictive=predictive, link="probit") for one in (bnn, built))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(bnn.log_marginal_likelihood(), built.log_marginal_likelihood())
    copied = pickle.loads(pickle.dumps(bnn))
    assert copied.temperature == 0.3


@pytest.mark.parametrize("options", [{"damping": True}, {"curvature_weight": 7.0}])
def test_options_assigned_after_the_fit(options):
    bnn, *_ = fitted()
    bnn.options = tyxe.LaplaceOptions(**options)
    built, *_ = fitted(**options)
    torch.testing.assert_close(precision_of(bnn), precision_of(built))
