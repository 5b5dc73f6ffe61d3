"""Streams of tasks for online Laplace, and posteriors of all their data."""

import functools

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.nn as nn

import tyxe
from tests.oracles.laplace import laplace_bnn
from tyxe.bnn.elbo import elbo_terms

EXACT = {"rtol": 1e-8, "atol": 1e-8}
NORMAL = dist.Normal(*torch.tensor([0.0, 1.3], dtype=torch.float64))
NOISE = 0.5
ADAM = functools.partial(torch.optim.Adam, lr=0.1)

LBFGS = functools.partial(
    torch.optim.LBFGS,
    max_iter=300,
    tolerance_grad=1e-12,
    tolerance_change=0.0,
    line_search_fn="strong_wolfe",
)


def four_lines(bnn):
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    posterior = bnn.net_guide.get_detached_distributions(sites)
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    return posterior


def maximize(bnn, x, y):
    """Find the mode to rounding, which Adam would not, and take the curvature there."""
    bnn.likelihood.dataset_size = len(x)
    bnn.net_guide.state = None
    optimizer = LBFGS(list(bnn.net_guide.parameters()))

    def closure():
        optimizer.zero_grad()
        terms = elbo_terms(bnn.model, bnn.net_guide, x, y)
        loss = bnn.temperature * terms.kl - terms.data
        loss.backward()
        return loss

    optimizer.step(closure)
    bnn.fit_curvature([(x, y)])


def stream(sizes, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(sum(sizes), 3)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]]) + 0.3 + NOISE * torch.randn(len(x), 1)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def linear_bnn(structure="full", **options):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    prior = tyxe.priors.IIDPrior(NORMAL)
    return laplace_bnn(nn.Linear(3, 1), prior, likelihood, structure=structure, **options)


def batch_posterior(tasks):
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = design.mT @ design / NOISE**2 + torch.eye(4) / NORMAL.scale**2
    return torch.linalg.solve(precision, design.mT @ y[:, 0] / NOISE**2), precision


def mode(bnn):
    return bnn.state.curvature.blocks.flatten(bnn._mean_values())


def classifier(structure="kron", net=None, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) if net is None else net
    likelihood = tyxe.likelihoods.Categorical(15)
    prior = tyxe.priors.IIDPrior(NORMAL)
    return laplace_bnn(net, prior, likelihood, structure=structure, **options)


def fitted(structure="kron", **options):
    """Return a classifier with the curvature of its first task."""
    bnn = classifier(structure, **options)
    bnn.fit_curvature([labels()])
    return bnn


def labels(points=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(points, 3, generator=generator), torch.randint(
        0, 3, (points,), generator=generator
    )


def energy(bnn, values):
    """Minus the log-density of the prior at weights, by the traced program."""
    trace = poutine.trace(poutine.condition(bnn.net_prior, values)).get_trace()
    return -trace.log_prob_sum()


def penalty_of(bnn, vector):
    """The quadratic penalty at weights, less that at the mode."""
    blocks = bnn.state.curvature.blocks
    centre = mode(bnn)
    return energy(bnn, blocks.unflatten(centre + vector)) - energy(bnn, blocks.unflatten(centre))
