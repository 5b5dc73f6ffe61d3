"""Laplace approximations as the tests ask for them, and nets for them."""

import dataclasses
import functools

import pyro.distributions as dist
import torch
import torch.nn as nn

import tyxe

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
OPTIONS = {field.name for field in dataclasses.fields(tyxe.LaplaceOptions)}


def laplace_bnn(net, prior, likelihood, **settings):
    """Return a `LaplaceBNN`, those of its settings that are options among them."""
    options = tyxe.LaplaceOptions(**{k: v for k, v in settings.items() if k in OPTIONS})
    rest = {k: v for k, v in settings.items() if k not in OPTIONS}
    return tyxe.LaplaceBNN(net, prior, likelihood, options=options, **rest)


def regression(structure="full", features=None, noise=0.5, scale=1.3, **options):
    """A linear regression with its exact posterior mean in the net."""
    torch.manual_seed(0)
    x = torch.randn(12, 3) if features is None else features
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]]) + 0.3 + noise * torch.randn(len(x), 1)
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = design.mT @ design / noise**2 + torch.eye(4) / scale**2
    mean = torch.linalg.solve(precision, design.mT @ y / noise**2)
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.copy_(mean[:3].mT)
        net.bias.copy_(mean[3])
    bnn = laplace_bnn(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, scale)),
        tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=noise),
        structure=structure,
        **options,
    )
    return bnn, x, y, design, precision, mean


def orthogonal():
    """Features orthogonal to each other and to the intercept."""
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(12, 1), torch.randn(12, 3)], 1))
    return basis[:, 1:] * 3


def classifier(structure="kron", points=15, prior=None, **options):
    torch.manual_seed(1)
    x, y = torch.randn(points, 3), torch.randint(0, 3, (points,))
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)) if prior is None else prior
    likelihood = tyxe.likelihoods.Categorical(points)
    return laplace_bnn(net, prior, likelihood, structure=structure, **options), x, y


def fitted(structure="kron", *given, data=None, **options):
    """Return a classifier with the curvature of its data, or of other data, and its own."""
    bnn, x, y = classifier(structure, *given, **options)
    bnn.fit_curvature([(x, y)] if data is None else data)
    return bnn, x, y


# Whose curvatures are one sum over a pass, with a part of each noise.
SUMMED = ("full", "kron", "diag")
STRUCTURES = (*SUMMED, "lowrank")
