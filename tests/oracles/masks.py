"""BNNs of every likelihood, masks over their data, and one step of training."""

import functools

import pyro.distributions as dist
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tyxe.poutine import selective_mask

EXPOSE = ["likelihood.data"]
ROWS = 6
LIKELIHOODS = {
    "Bernoulli": (lambda n: tyxe.likelihoods.Bernoulli(n), 1, lambda: torch.ones(ROWS, 1)),
    "Categorical": (
        lambda n: tyxe.likelihoods.Categorical(n),
        3,
        lambda: torch.randint(0, 3, (ROWS,)),
    ),
    "HomoskedasticGaussian": (
        lambda n: tyxe.likelihoods.HomoskedasticGaussian(n, scale=0.5),
        2,
        lambda: torch.randn(ROWS, 2),
    ),
    "HomoskedasticGaussian, inferred": (
        lambda n: tyxe.likelihoods.HomoskedasticGaussian(n, scale=dist.LogNormal(0.0, 1.0)),
        1,
        lambda: torch.randn(ROWS, 1),
    ),
    "HeteroskedasticGaussian": (
        lambda n: tyxe.likelihoods.HeteroskedasticGaussian(n),
        2,
        lambda: torch.randn(ROWS, 1),
    ),
    "Poisson": (lambda n: tyxe.likelihoods.Poisson(n), 1, lambda: torch.arange(ROWS)[:, None]),
}


def make(name, dataset_size):
    torch.manual_seed(1)
    build, outputs, targets = LIKELIHOODS[name]
    likelihood = build(dataset_size)
    bnn = tyxe.VariationalBNN(
        nn.Linear(3, outputs).double(),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        likelihood,
        functools.partial(
            tyxe.guides.AutoNormal, init_loc_fn=tyxe.guides.init_to_normal, init_scale=0.3
        ),
        tyxe.guides.AutoNormal if likelihood.latent_priors() else None,
    ).double()
    y = targets()
    return bnn, torch.randn(ROWS, 3).double(), y.double() if y.is_floating_point() else y


def masked(mask):
    return selective_mask(mask=mask, expose=EXPOSE)


def seeded(function, *args, **options):
    torch.manual_seed(2)
    return function(*args, **options)


def fitted(bnn, x, y, **options):
    """Loss and gradient of one step."""
    optim = torch.optim.SGD(bnn.parameters(), lr=0.0)
    history = seeded(bnn.fit, [(x, y)], optim, 1, **options)
    gradient = torch.cat([p.grad.flatten() for p in bnn.parameters() if p.grad is not None])
    numbers = [history.loss[0], history.log_likelihood[0], history.kl[0]]
    return torch.tensor(numbers, dtype=torch.float64), gradient


def kl_by_site(bnn):
    priors, posterior = dict(bnn.net_prior.priors()), bnn.net_guide.posterior()
    prefix = bnn.net_prior.prefix
    return {name: td.kl_divergence(posterior[prefix + name], priors[name]) for name in priors}


MASKS = {
    "some": torch.tensor([True, False, True, True, False, False]),
    "one": torch.tensor([False, False, False, False, False, True]),
    "all": torch.ones(ROWS, dtype=torch.bool),
}
