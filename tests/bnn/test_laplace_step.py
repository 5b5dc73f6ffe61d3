"""[GLM fig. 3]: the step example, whose predictions are two-dimensional integrals.

`p(y = 1 | x) = sigmoid(5 tanh(w1 x + w2))`, N(0, 1) priors, five points on either side of a step.
The true posterior has no mass at `w1 < 0`, the Gaussian of the GGN has some: weights drawn from it
give functions that fall where the data rise, and the linearised net does not.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.laplace import laplace_bnn
from tests.oracles.nets import NetOf

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


def grid(half_width=9.0, points=401):
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


def test_the_precision_is_the_ggn():
    assert float(mode()[0]) == pytest.approx(0.65, abs=5e-3)
    precision = at_the_mode().net_guide.precision.to_dense()
    torch.testing.assert_close(precision, ggn(mode()), rtol=1e-10, atol=1e-10)


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
