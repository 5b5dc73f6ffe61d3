"""Fitting, saving and reassigning a Laplace approximation, and an example by integrals."""

import functools
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from torch.autograd.functional import hessian, jacobian

import tyxe
from tests.oracles.bnns import NORMAL, mlp
from tests.oracles.laplace import STRUCTURES, classifier, fitted, laplace_bnn, regression
from tests.oracles.nets import NetOf
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


# --- [GLM fig. 3] ---------------------------------------------------------------------------------
# The step example, whose predictions are two-dimensional integrals.
# `p(y = 1 | x) = sigmoid(5 tanh(w1 x + w2))`, N(0, 1) priors, five points on either side of a step.
# The true posterior has no mass at `w1 < 0`, the Gaussian of the GGN has some: weights drawn from
# it give functions that fall where the data rise, and the linearised net does not.


A = 5.0
POSITIVE = torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0], dtype=torch.float64)
X = torch.cat([-POSITIVE.flip(0), POSITIVE])[:, None]
Y = (X > 0).double()
AT = torch.tensor([[4.0]], dtype=torch.float64)


def step(linear):
    return NetOf(lambda self, x: A * self.linear(x).tanh(), linear=linear)


def log_joint(weights):
    """`log p(D, w)` up to a constant, written out; weights `(..., 2)`."""
    outputs = A * (weights[..., :1] * X[:, 0] + weights[..., 1:]).tanh()
    signs = 2 * Y[:, 0] - 1
    return nn.functional.logsigmoid(signs * outputs).sum(-1) - weights.square().sum(-1) / 2


def grid(half_width=9.0, points=201):
    axis = torch.linspace(-half_width, half_width, points, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


def average(log_density, values):
    """The mean of `values` on the grid; the equal steps of the grid cancel."""
    return float((log_density.softmax(0) * values).sum())


@functools.cache
def mode():
    """The maximum of the joint, by Newton's method."""
    weights = torch.tensor([0.6, 0.1], dtype=torch.float64)
    for _ in range(50):
        gradient = jacobian(log_joint, weights)
        weights = weights - torch.linalg.solve(hessian(log_joint, weights), gradient)
    assert float(jacobian(log_joint, weights).abs().max()) < 1e-12
    return weights


def ggn(weights):
    """`sum_n J_n^T p_n (1 - p_n) J_n + I`, written out."""
    pre = weights[0] * X + weights[1]
    jacobian = A * (1 - pre.tanh().square()) * torch.cat([X, torch.ones_like(X)], 1)
    p = (A * pre.tanh()).sigmoid()
    return jacobian.mT @ (p * (1 - p) * jacobian) + torch.eye(2, dtype=torch.float64)


def at_the_mode(structure="full", **options):
    linear = nn.Linear(1, 1, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(mode(), linear.parameters())
    likelihood = tyxe.likelihoods.Bernoulli(len(X), event_dim=1)
    bnn = laplace_bnn(step(linear), NORMAL, likelihood, structure=structure, **options)
    bnn.fit_curvature([(X, Y)])
    return bnn


def probability_at_4(weights):
    return (A * (AT[0, 0] * weights[..., 0] + weights[..., 1]).tanh()).sigmoid()


def test_the_damped_posterior_is_narrower():
    damped, kron = at_the_mode("kron", damping=True), at_the_mode("kron")
    outer = torch.cat([X, torch.ones_like(X)], 1)
    pre = mode()[0] * X + mode()[1]
    p = (A * pre.tanh()).sigmoid()
    g = (p * (1 - p) * (A * (1 - pre.tanh().square())).square()).sum()
    n = len(X)
    q = outer.mT @ outer / n
    eye = torch.eye(2, dtype=torch.float64)
    # [T 3.41] with E over points, N = n and tau = 1.
    expected = (math.sqrt(n) * q + eye) * (math.sqrt(n) * g / n + 1)
    torch.testing.assert_close(damped.net_guide.precision.to_dense(), expected)
    torch.testing.assert_close(kron.net_guide.precision.to_dense(), q * g + eye)
    assert bool((expected - (q * g + eye)).diagonal().gt(0).all())


def test_glm_extrapolates_and_bnn_does_not():
    weights = grid()
    deviation = weights - mode()
    gaussian = -((deviation @ ggn(mode())) * deviation).sum(-1) / 2
    # The same Gaussian over weights, through the net and through its linearisation.
    slope = A * (1 - (4 * mode()[0] + mode()[1]).tanh().square())
    output = A * (4 * mode()[0] + mode()[1]).tanh()
    through_net = average(gaussian, probability_at_4(weights))
    linear = output + slope * (4 * deviation[:, 0] + deviation[:, 1])
    through_linear = average(gaussian, linear.sigmoid())
    assert through_net == pytest.approx(0.85, abs=5e-3)
    assert through_linear == pytest.approx(0.99, abs=5e-3)

    bnn, count = at_the_mode(), 4_000
    for predictive, exact, values in (
        ("bnn", through_net, probability_at_4(weights)),
        ("glm", through_linear, linear.sigmoid()),
    ):
        options = {"num_predictions": count, "predictive": predictive, "vectorize": True}
        found = bnn.predict(AT, **options).sigmoid()
        variance = average(gaussian, values.square()) - exact**2
        assert abs(float(found) - exact) < 4 * math.sqrt(variance / count)
    # No samples: the linearised output's variance, in closed form.
    row = slope * torch.tensor([4.0, 1.0]).double()
    expected = row @ torch.linalg.inv(ggn(mode())) @ row
    torch.testing.assert_close(bnn.functional_variance(AT).squeeze(), expected)
