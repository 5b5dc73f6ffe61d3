"""Small BNNs of every wrapper, and a stream of tasks for them."""

import functools
import math

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.laplace import laplace_bnn
from tyxe.continual import Heads, TaskLoop
from tyxe.guides import AutoNormal

N = 12
TASKS = ["first", "second", "third"]
# After each of three tasks, on each of them; the last was not measured after the first.
ACCURACY = torch.tensor(
    [
        [0.90, 0.50, math.nan],
        [0.95, 0.80, 0.60],
        [0.70, 0.85, 0.99],
    ]
)


class Net(nn.Module):
    """A body with a norm, and a head with one: buffers on both sides."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))

    def forward(self, x):
        return self.head(self.body(x))


def normal(**rules):
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def variational(guide=AutoNormal, **rules):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.VariationalBNN(Net(), normal(hide_modules=["head"], **rules), likelihood, guide)


def maximum_likelihood():
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return tyxe.VariationalBNN(Net(), normal(hide_all=True), likelihood)


def laplace(**options):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    return laplace_bnn(Net(), normal(hide_modules=["head"]), likelihood, **options)


WRAPPERS = {
    "variational": variational,
    "low rank": lambda: variational(AutoLowRankMultivariateNormal),
    "maximum a posteriori": lambda: variational(AutoDelta),
    "maximum likelihood": maximum_likelihood,
    "Laplace, diagonal": lambda: laplace(structure="diag"),
    "Laplace, Kronecker": laplace,
    "Laplace, average of factors": lambda: laplace(accumulate="average"),
    "Laplace, penalties of tasks": lambda: laplace(accumulate="per_task", curvature_weight=3.0),
    "Laplace, full": lambda: laplace(structure="full"),
}


def data(task):
    generator = torch.Generator().manual_seed(TASKS.index(task))
    x = torch.randn(N, 3, generator=generator)
    return x, (x[:, TASKS.index(task), None] > 0).float()


def assert_equal(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(actual[key], value)
    else:
        assert actual == expected


def loop_of(make, tasks=TASKS, **options):
    bnn = make()
    heads = Heads(bnn, modules=["head"])

    def fit(task):
        x, y = data(task)
        order = torch.randperm(N)  # the run depends on the random generator
        bnn.fit([(x[order], y[order])], functools.partial(torch.optim.Adam, lr=1e-2), 3)

    def evaluate(task):
        return 1 - bnn.evaluate(*data(task), num_predictions=2, reduction="mean")[0].item()

    # A point estimate has no posterior to make a prior of.
    update = (lambda task: None) if make is WRAPPERS["maximum a posteriori"] else None
    return TaskLoop(bnn, tasks, fit, evaluate, update, heads=heads, **options)
