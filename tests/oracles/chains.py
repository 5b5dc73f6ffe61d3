"""A conjugate regression for chains, and potentials with their gradients."""

import functools
import math

import pyro.distributions as dist
import torch
from pyro.infer.mcmc import HMC, NUTS
from pyro.ops.stats import effective_sample_size
from torch import nn

import tyxe
from tyxe.likelihoods import HomoskedasticGaussian

N, NOISE = 12, 0.5
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.5))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, generator=generator).double()
    y = 0.8 * x - 0.3 + NOISE * torch.randn(N, 1, generator=generator).double()
    return x, y


def posterior(temperature=1.0):
    """Return mean and covariance of weight and bias under the prior and a tempered likelihood."""
    x, y = data()
    design = torch.cat([x, torch.ones(N, 1).double()], 1) / NOISE / temperature**0.5
    precision = design.T @ design + torch.eye(2).double() / 1.5**2
    mean = torch.linalg.solve(precision, design.T @ y / NOISE / temperature**0.5).squeeze(-1)
    return mean, torch.linalg.inv(precision)


def assert_samples(samples, mean, covariance):
    """Compare samples of weight and bias with exact moments."""
    assert samples.keys() == {"net.weight", "net.bias"}
    both = torch.cat([samples["net.weight"].flatten(1), samples["net.bias"]], 1)
    assert_moments(both, mean, covariance)


def make(kernel=None, likelihood=None, net=None):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    kernel = kernel or functools.partial(HMC, step_size=0.15, num_steps=6)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1).double(), PRIOR, likelihood, kernel).double()


def fitted(num_samples=40, **options):
    bnn = make(**options)
    bnn.fit([data()], num_samples, warmup_steps=10, disable_progbar=True)
    return bnn


def assert_moments(samples, mean, covariance):
    """Compare `(S, P)` samples of one chain with exact moments, in standard errors by their ESS."""

    def close(values, expected):
        ess = effective_sample_size(values[None], chain_dim=0, sample_dim=1)
        assert ess > 50
        error = values.std() / math.sqrt(ess)
        assert abs(values.mean() - expected) < 4 * error

    centred = samples - mean
    for i in range(samples.shape[1]):
        close(samples[:, i], mean[i])
        for j in range(i + 1):
            close(centred[:, i] * centred[:, j], covariance[i, j])


KERNELS = {
    "HMC": functools.partial(HMC, step_size=0.15, num_steps=6),
    "NUTS": functools.partial(NUTS, step_size=0.15),
}


def layered():
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def value_and_gradient(potential, point):
    value = potential(point)
    return value.detach(), torch.autograd.grad(value, list(point.values()))
