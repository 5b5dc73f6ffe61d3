"""BNNs to save and copy, and what it means that two are the same."""

import functools
import io

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from pyro.infer.autoguide import AutoNormal as PyroAutoNormal
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe
from tyxe.guides import AutoNormal, AutoRadial
from tyxe.likelihoods import HomoskedasticGaussian

N = 12


GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoNormal, capped": functools.partial(AutoNormal, init_scale=0.01, max_guide_scale=0.1),
    "AutoRadial": AutoRadial,
    "pyro.AutoNormal": PyroAutoNormal,
    "AutoDiagonalNormal": autoguide.AutoDiagonalNormal,
    "AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": autoguide.AutoLowRankMultivariateNormal,
    "AutoDelta": autoguide.AutoDelta,
}


ADAM = functools.partial(torch.optim.Adam, lr=0.01)
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])


def net(hidden=4):
    return nn.Sequential(nn.Linear(2, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 1))


def make(guide=AutoNormal, prior=NORMAL, hidden=4):
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    return tyxe.VariationalBNN(net(hidden), prior, likelihood, guide, AutoNormal)


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 2, generator=generator), torch.randn(N, 1, generator=generator)


def fitted(guide=AutoNormal, epochs=3):
    bnn = make(guide)
    bnn.fit([data()], ADAM, epochs)
    return bnn


def assert_same_state(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, right[name], rtol=0, atol=0, msg=name)
        else:
            assert value == right[name]


def assert_same_predictions(left, right, **options):
    x = data()[0].to(next(left.parameters()).dtype)

    def predict(bnn):
        pyro.set_rng_seed(9)
        return bnn.predict(x, num_predictions=3, **options)

    torch.testing.assert_close(predict(left), predict(right), rtol=0, atol=0)


def through_a_file(thing):
    torch.save(thing, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def mcmc():
    return tyxe.MCMC_BNN(
        nn.Linear(2, 1),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5)),
        functools.partial(HMC, step_size=0.05, num_steps=3),
    )


def sampled(num_samples=4):
    bnn = mcmc()
    bnn.fit([data()], num_samples=num_samples, warmup_steps=1, num_chains=1, disable_progbar=True)
    return bnn
