"""Conjugate regressions: posterior, ELBO in closed form, and draws that have exact moments."""

import math

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import nn

import tyxe
from tyxe.bnn import elbo_terms
from tyxe.distributions import Gaussian
from tyxe.likelihoods import HomoskedasticGaussian

N, D, NOISE, PRIOR_STD = 12, 2, 0.5, 1.5


def regression():
    x = torch.randn(N, D).double()
    y = x @ torch.tensor([[1.0], [-0.7]]).double() + 0.3 + NOISE * torch.randn(N, 1).double()
    return x, y


def precision_and_mean(x, y):
    """The exact posterior of `(weight, bias)`: `x'x / noise^2 + 1 / std^2`."""
    design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    precision = design.T @ design / NOISE**2 + torch.eye(D + 1).double() / PRIOR_STD**2
    return precision, torch.linalg.solve(precision, design.T @ y / NOISE**2).squeeze(-1)


def linear_bnn(guide, dataset_size=N, prior=None, likelihood=None, likelihood_guide=None):
    return tyxe.VariationalBNN(
        nn.Linear(D, 1).double(),
        prior or tyxe.priors.IIDPrior(dist.Normal(0.0, PRIOR_STD)),
        likelihood or HomoskedasticGaussian(dataset_size, scale=NOISE),
        guide,
        likelihood_guide,
    ).double()


class SigmaPoints(Messenger):
    """Give Gaussian latents in turn `2 P` points, whose average is exact for quadratics.

    Point `k` sets the k-th coordinate of the noise to `+-sqrt(P)` and all others to 0: mean 0 and
    covariance the identity, as a standard normal has. Every term of the ELBO of a linear-Gaussian
    model is quadratic in the noise, so the average over the points is the ELBO itself.
    """

    def __init__(self, sizes):
        super().__init__()
        self.total = sum(sizes.values())
        self.offsets = dict(zip(sizes, torch.tensor([0, *sizes.values()]).cumsum(0), strict=False))
        self.sizes, self.point = sizes, -1

    def noise(self, name):
        if self.offsets[name] == 0:
            self.point = (self.point + 1) % (2 * self.total)
        eps = torch.zeros(self.total).double()
        eps[self.point // 2] = math.sqrt(self.total) * (-1) ** self.point
        return eps[self.offsets[name] :][: self.sizes[name]]

    def _pyro_sample(self, msg):
        if msg["name"] not in self.sizes or msg["value"] is not None:
            return
        fn, eps = msg["fn"], self.noise(msg["name"])
        if isinstance(fn, Gaussian):
            msg["value"] = fn.loc + fn.precision.inverse_sqrt(eps)
        else:
            base = fn.base_dist
            msg["value"] = base.loc + base.scale * eps.reshape(base.loc.shape)
        msg["done"] = True


MEAN_FIELD_SITES = {"net.weight": D, "net.bias": 1}


def exact_elbo(bnn, points, x, y, **options):
    """The ELBO without Monte Carlo error, and its gradient."""
    terms = [elbo_terms(bnn.model, bnn.guide, x, y, **options) for _ in range(2 * points.total)]
    return sum(t.data - t.kl for t in terms) / len(terms)
