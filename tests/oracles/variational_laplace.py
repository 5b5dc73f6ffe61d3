"""Small smooth BNNs for the variational Laplace, and pseudo-labels that a test chooses."""

import functools

import pyro.distributions as dist
import torch
from torch import nn
from torch.func import functional_call

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)
from tyxe.poutine import variational_laplace

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def smooth_net(outputs=3):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def bnn_of(net, likelihood, init_scale=0.3, **options):
    guide = functools.partial(AutoNormal, init_scale=init_scale, init_loc_fn=start_of(net))
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide, **options)


def start_of(net):
    return tyxe.guides.PretrainedInitializer.from_net(net)


def terms_of(bnn, x, y):
    return elbo_terms(bnn.model, bnn.guide, x, y)


def moments_of(bnn):
    guide = bnn.net_guide
    names = [site.own_name for site in guide.sites]
    return {n: (guide.get_loc(n).detach(), guide.get_scale(n).detach() ** 2) for n in names}


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def as_function(bnn, x):
    """The net's outputs as a function of all weights in one vector, and the guide's means."""
    moments = moments_of(bnn)
    shapes = {name: loc.shape for name, (loc, _) in moments.items()}

    def outputs(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        weights = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        return functional_call(bnn.net, weights, (x,))

    return outputs, flat([loc for loc, _ in moments.values()])


def variances_of(bnn):
    return flat([variance for _, variance in moments_of(bnn).values()])


def linear_gaussian(points=7):
    x = torch.randn(points, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.5
    bnn = bnn_of(nn.Linear(2, 1).double(), HomoskedasticGaussian(points, scale=0.7))
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return bnn, x, y


def likelihoods(points):
    return {
        "categorical": (Categorical(points), torch.randint(3, (points,)), 3),
        "bernoulli": (
            Bernoulli(points, event_dim=1),
            torch.randint(2, (points, 3)).double(),
            3,
        ),
        "poisson": (Poisson(points, event_dim=1), torch.randint(5, (points, 2)).double(), 2),
        "heteroskedastic": (
            HeteroskedasticGaussian(points),
            torch.randn(points, 2, dtype=torch.float64),
            4,
        ),
        "homoskedastic": (
            HomoskedasticGaussian(points, scale=0.5),
            torch.randn(points, 2, dtype=torch.float64),
            2,
        ),
    }


class with_labels(variational_laplace):
    """The Fisher form at pseudo-labels that a test has chosen."""

    def __init__(self, labels):
        super().__init__()
        self.labels = labels

    def _labels(self, fn, value):
        return self.labels


def small():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    return bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64), y
