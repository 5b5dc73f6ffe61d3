"""A BNN whose weights are spread, and the metrics of its predictions by hand."""

import functools
import math

import pyro
import pyro.distributions as dist
import torch
from torch import nn

import tyxe
from tyxe.guides import AutoNormal

N, S = 11, 5
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
GUIDE = functools.partial(AutoNormal, init_loc_fn=tyxe.guides.init_to_sample, init_scale=0.3)


def net(outputs=3):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def make(module=None, likelihood=None, guide=GUIDE, prior=NORMAL, likelihood_guide=None):
    pyro.set_rng_seed(0)
    return tyxe.VariationalBNN(
        module or net(),
        prior,
        likelihood or tyxe.likelihoods.Categorical(N),
        guide,
        likelihood_guide,
    ).double()


def inputs():
    return torch.randn(N, 2, generator=torch.Generator().manual_seed(0)).double()


def seeded(function, *args, **kwargs):
    pyro.set_rng_seed(5)
    return function(*args, **kwargs)


def log_mean_exp(values):
    return values.logsumexp(0) - math.log(len(values))


def categorical(outputs, y):
    probs = outputs.softmax(-1)
    error = (probs.mean(0).argmax(-1) != y).double()
    return error, probs[:, torch.arange(N), y].mean(0).log()


def bernoulli(outputs, y):
    probs = outputs.sigmoid().squeeze(-1)
    y = y.squeeze(-1)
    error = ((probs.mean(0) > 0.5) != (y > 0.5)).double()
    return error, torch.where(y > 0.5, probs, 1 - probs).mean(0).log()


def homoskedastic(outputs, y):
    error = (outputs.mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Normal(outputs, 0.4).log_prob(y).sum(-1))


def heteroskedastic(outputs, y):
    loc, scale = outputs[..., :1], nn.functional.softplus(outputs[..., 1:])
    error = (loc.mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Normal(loc, scale).log_prob(y).sum(-1))


def poisson(outputs, y):
    error = (outputs.exp().mean(0) - y).square().sum(-1)
    return error, log_mean_exp(dist.Poisson(outputs.exp()).log_prob(y).sum(-1))


LIKELIHOODS = {
    "Categorical": (tyxe.likelihoods.Categorical(N), 3, torch.arange(N) % 3, categorical),
    "Bernoulli": (tyxe.likelihoods.Bernoulli(N), 1, torch.arange(N)[:, None] % 2, bernoulli),
    "HomoskedasticGaussian": (
        tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.4),
        2,
        torch.arange(2.0 * N).reshape(N, 2) / N,
        homoskedastic,
    ),
    "HeteroskedasticGaussian": (
        tyxe.likelihoods.HeteroskedasticGaussian(N),
        2,
        torch.arange(1.0 * N)[:, None] / N,
        heteroskedastic,
    ),
    "Poisson": (tyxe.likelihoods.Poisson(N), 1, torch.arange(N)[:, None], poisson),
}


class Tracked(nn.Sequential):
    """A class of the user's own, with a forward that counts."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)
