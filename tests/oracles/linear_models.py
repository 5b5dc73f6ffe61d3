"""Linearised models away from their mode, and what is known of their posteriors."""

import functools

import numpy as np
import torch

import tyxe
from tests.oracles.fits import minimise
from tyxe.likelihoods import output_hessian
from tyxe.linalg import Dense
from tyxe.predictive import refine_variational
from tyxe.predictive.linear_model import LinearModel
from tyxe.predictive.natural_gradient import Iterate

# Twelve points: from 12 outputs in all (poisson) to 72 (pixels).
LIKELIHOODS = {
    "gaussian": (lambda: tyxe.likelihoods.HomoskedasticGaussian(12, scale=0.6), (2,)),
    "categorical": (lambda: tyxe.likelihoods.Categorical(12), (3,)),
    "pixels": (lambda: tyxe.likelihoods.Categorical(12), (2, 3)),
    "bernoulli": (lambda: tyxe.likelihoods.Bernoulli(12), (2,)),
    "poisson": (lambda: tyxe.likelihoods.Poisson(12), ()),
}


def made(name, weights=5, weight=1.0, jacobian=None):
    """A linear model away from its mode, with a prior that is no standard normal."""
    make, shape = LIKELIHOODS[name]
    likelihood, outputs = make(), torch.randn(12, *shape)
    size = outputs[0].numel()
    return LinearModel(
        torch.randn(12, size, weights) if jacobian is None else jacobian,
        outputs,
        torch.randn(weights),
        torch.randn(weights),
        0.2 + torch.rand(weights),
        likelihood,
        likelihood.sample(torch.randn(12, *shape)),
        weight,
    )


def in_single_precision(model):
    return LinearModel(
        **{
            k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in vars(model).items()
        }
    )


def dense_precision(model, outputs):
    total = model.prior_precision.diag()
    for j, blocks in zip(model.jacobian, output_hessian(model.likelihood, outputs), strict=True):
        total = total + model.weight * j.mT @ torch.block_diag(*blocks) @ j
    return total


def conjugate(model):
    """Mean and precision of the exact posterior under Gaussian noise."""
    rows = model.jacobian.flatten(0, 1)
    noise = model.likelihood.scale.double().square()
    precision = model.weight * rows.mT @ rows / noise + model.prior_precision.diag()
    targets = (model.targets - model.outputs).flatten() + rows @ model.loc
    right = model.weight * rows.mT @ targets / noise + model.prior_precision * model.prior_mean
    return torch.linalg.solve(precision, right), precision


# ------------------------------------------------------------------ variational


def refined(monkeypatch, draws, model, *arguments, **options):
    """Return what `refine_variational` does with the outputs that `draws` yields."""
    with monkeypatch.context() as patch:
        patch.setattr(Iterate, "draws", lambda self, num: draws(self.model, *self.posterior(), num))
        return refine_variational(model, *arguments, **options)


def natural_gradient(model, draws, rate, num_steps):
    """The steps as the formula has them, on dense matrices."""
    mean, precision = model.loc, dense_precision(model, model.outputs)
    for _ in range(num_steps):
        outputs = list(draws(model, mean, Dense(precision), 2))
        curvature = torch.stack([dense_precision(model, one) for one in outputs]).mean(0)
        precision = (1 - rate) * precision + rate * curvature
        prior = -model.prior_precision * (mean - model.prior_mean)
        gradient = torch.stack([fit_slope(model, one) for one in outputs]).mean(0) + prior
        mean = mean + rate * torch.linalg.solve(precision, gradient)
    return mean, precision


def fit_slope(model, outputs):
    """The gradient in the weights of the log-likelihood at given outputs, by autograd."""
    at = outputs.clone().requires_grad_()
    fit = model.likelihood.log_likelihood(at, model.targets, "sum")
    (residual,) = torch.autograd.grad(fit, at)
    return model.weight * residual.flatten() @ model.jacobian.flatten(0, 1)


# The nodes and weights of a quadrature that is exact to rounding here.
NODES, WEIGHTS = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def logistic(weights):
    """A logistic regression on 15 points of two inputs and a constant, and of noise beyond."""
    x = torch.cat([torch.randn(15, 2), torch.ones(15, 1)], 1)
    y = (x @ torch.tensor([1.5, -1.0, 0.3]) + 0.5 * torch.randn(15) > 0).double()
    more = weights - 3
    return LinearModel(
        torch.cat([x, torch.randn(15, more)], 1)[:, None],
        torch.zeros(15),
        torch.zeros(weights),
        torch.tensor([0.2, 0.0, -0.1] + [0.1] * more),
        torch.tensor([0.5, 1.0, 2.0] + [3.0] * more),
        tyxe.likelihoods.Bernoulli(15),
        y,
    )


@functools.cache
def best_gaussian(structure, weights=3):
    """A logistic regression, and the optimum of its ELBO by quadrature and autograd."""
    torch.manual_seed(0)
    model = logistic(weights)
    x, sign = model.jacobian[:, 0], 2 * model.targets - 1
    mean = torch.zeros(weights, requires_grad=True)
    root = torch.zeros(weights, weights, requires_grad=True)

    def lower():
        return root.tril(-1) * (structure == "full") + root.diagonal().exp().diag()

    def negative_elbo():
        scale = (x @ lower()).square().sum(1).sqrt()
        outputs = x @ mean + NODES[:, None] * scale
        fit = (WEIGHTS @ torch.nn.functional.logsigmoid(sign * outputs)).sum()
        squares = (mean - model.prior_mean).square() + lower().square().sum(1)
        return (model.prior_precision * squares).sum() / 2 - fit - root.diagonal().sum()

    minimise([mean, root], negative_elbo, max_iter=2000, tolerance_grad=1e-12)
    assert float(mean.grad.abs().max()) < 1e-7
    return model, mean.detach(), torch.cholesky_inverse(lower()).detach()
