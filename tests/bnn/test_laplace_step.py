"""[GLM fig. 3]: the step example, whose true posterior is a two-dimensional integral.

`p(y = 1 | x) = sigmoid(5 tanh(w1 x + w2))`, N(0, 1) priors, five points on either side of a step.
The true posterior has no mass at `w1 < 0`, the Gaussian of the GGN has some: weights drawn from it
give functions that fall where the data rise, and the linearised net does not.
"""

import functools
import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import tyxe
from tests.oracles.laplace import laplace_bnn

A = 5.0
POSITIVE = torch.tensor([1.0, 1.5, 2.0, 2.5, 3.0], dtype=torch.float64)
X = torch.cat([-POSITIVE.flip(0), POSITIVE])[:, None]
Y = (X > 0).double()
AT = torch.tensor([[4.0]], dtype=torch.float64)


class Step(nn.Module):
    """`a tanh(w1 x + w2)`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return A * self.linear(x).tanh()


def log_joint(weights: Tensor) -> Tensor:
    """`log p(D, w)` up to a constant, written out; weights `(..., 2)`."""
    outputs = A * (weights[..., :1] * X[:, 0] + weights[..., 1:]).tanh()
    signs = 2 * Y[:, 0] - 1
    return nn.functional.logsigmoid(signs * outputs).sum(-1) - weights.square().sum(-1) / 2


def grid(half_width: float = 9.0, points: int = 801) -> Tensor:
    half = torch.linspace(0, half_width, points // 2 + 1, dtype=torch.float64)
    axis = torch.cat([-half[1:].flip(0), half])
    return torch.cartesian_prod(axis, axis)


def average(log_density: Tensor, values: Tensor) -> float:
    """The mean of `values` on the grid; the equal steps of the grid cancel."""
    return float((log_density.softmax(0) * values).sum())


def falls(weights: Tensor) -> Tensor:
    """Whether the function falls; half of a grid's cell at zero does."""
    return torch.heaviside(-weights[:, 0], weights.new_tensor(0.5))


@functools.cache
def mode() -> Tensor:
    """The maximum of the joint, by Newton's method."""
    weights = torch.tensor([0.6, 0.1], dtype=torch.float64)
    for _ in range(50):
        gradient = jacobian(log_joint, weights)
        weights = weights - torch.linalg.solve(hessian(log_joint, weights), gradient)
    assert float(jacobian(log_joint, weights).abs().max()) < 1e-12
    return weights


def ggn(weights: Tensor) -> Tensor:
    """`sum_n J_n^T p_n (1 - p_n) J_n + I`, written out."""
    pre = weights[0] * X + weights[1]
    jacobian = A * (1 - pre.tanh().square()) * torch.cat([X, torch.ones_like(X)], 1)
    p = (A * pre.tanh()).sigmoid()
    return jacobian.mT @ (p * (1 - p) * jacobian) + torch.eye(2, dtype=torch.float64)


def at_the_mode(structure: str = "full", **options: bool) -> tyxe.LaplaceBNN:
    net = Step()
    with torch.no_grad():
        net.linear.weight.fill_(float(mode()[0]))
        net.linear.bias.fill_(float(mode()[1]))
    bnn = laplace_bnn(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        tyxe.likelihoods.Bernoulli(len(X), event_dim=1),
        structure=structure,
        **options,
    )
    bnn.fit_curvature([(X, Y)])
    return bnn


def probability_at_4(weights: Tensor) -> Tensor:
    return (A * (AT[0, 0] * weights[..., 0] + weights[..., 1]).tanh()).sigmoid()


def test_the_true_posterior():
    coarse, fine = grid(8.0, 401), grid(10.0, 801)
    for weights in (coarse, fine):
        assert average(log_joint(weights), falls(weights)) < 1e-5
    # The trapezoidal rule is exact but for the tails, so steps and ends do not matter.
    on_coarse, on_fine = (average(log_joint(w), probability_at_4(w)) for w in (coarse, fine))
    assert on_coarse == pytest.approx(on_fine, abs=1e-9)
    assert on_fine == pytest.approx(0.99, abs=5e-3)


def test_the_ggn_puts_mass_on_functions_that_fall():
    assert float(mode()[0]) == pytest.approx(0.65, abs=5e-3)
    assert float(mode()[1]) == pytest.approx(0.0, abs=1e-10)
    precision = at_the_mode().net_guide.precision.to_dense()
    torch.testing.assert_close(precision, ggn(mode()), rtol=1e-10, atol=1e-10)
    scale = float(torch.linalg.inv(precision)[0, 0].sqrt())
    falling = 0.5 * math.erfc(float(mode()[0]) / scale / math.sqrt(2))
    # .14 in the notes of this experiment, which was found by sampling.
    assert falling == pytest.approx(0.134, abs=5e-4)
    draws = [values["net.linear.weight"] for values in at_the_mode()._draws(4_000)]
    share = float((torch.stack(draws) < 0).double().mean())
    assert abs(share - falling) < 4 * math.sqrt(falling * (1 - falling) / 4_000)


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
        found = bnn.predict(
            AT, num_predictions=count, predictive=predictive, vectorize=True
        ).sigmoid()
        variance = average(gaussian, values.square()) - exact**2
        assert abs(float(found) - exact) < 4 * math.sqrt(variance / count)
    # No samples: the linearised output's variance, in closed form.
    row = slope * torch.tensor([4.0, 1.0]).double()
    expected = row @ torch.linalg.inv(ggn(mode())) @ row
    torch.testing.assert_close(bnn.functional_variance(AT).squeeze(), expected)
