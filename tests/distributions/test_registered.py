"""A distribution of one's own that is registered as a Gaussian has the closed forms of one."""

import functools

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import nn

import tyxe
from tyxe.distributions import as_gaussian

X, Y = torch.linspace(-1, 1, 15)[:, None], torch.zeros(15, 2)


class ByPrecision(dist.TorchDistribution):
    """Independent Normals by their precisions, as one event."""

    arg_constraints: dict = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, loc, precision):
        self.loc, self.precision = loc, precision
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    support = property(lambda self: td.constraints.independent(td.constraints.real, self.loc.dim()))
    mean = property(lambda self: self.loc)
    variance = property(lambda self: 1 / self.precision)

    def rsample(self, sample_shape=()):
        noise = torch.randn(*sample_shape, *self.loc.shape)
        return self.loc + self.precision.rsqrt() * noise

    def log_prob(self, value):
        normal = td.Normal(self.loc, self.precision.rsqrt())
        return normal.log_prob(value).flatten(-self.loc.dim()).sum(-1)

    def expand(self, batch_shape, _instance=None):
        return self


@as_gaussian.register
def _(distribution: ByPrecision):
    return td.Normal(distribution.loc, distribution.precision.rsqrt())


def bnn_with(make):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(15, scale=0.6)
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.5)
    prior = tyxe.priors.LambdaPrior(lambda name, module, parameter: make(parameter))
    return tyxe.VariationalBNN(nn.Linear(1, 2), prior, likelihood, guide)


PRIORS = {
    "registered": lambda p: ByPrecision(torch.full_like(p, 0.3), torch.full_like(p, 4.0)),
    "Normal": lambda p: dist.Normal(0.3, 0.5).expand(p.shape).to_event(p.dim()),
}


def test_the_kl_to_a_registered_prior_is_in_closed_form():
    kls = [
        bnn_with(make).fit([(X, Y)], functools.partial(torch.optim.SGD, lr=0.0), 3).kl
        for make in PRIORS.values()
    ]
    assert kls[0] == pytest.approx(kls[1])
    assert kls[0][0] == pytest.approx(kls[0][2])


def test_ivon_takes_a_registered_prior():
    found = []
    for make in PRIORS.values():
        bnn = bnn_with(make)
        bnn.fit([(X, Y)], functools.partial(tyxe.optim.IVON, lr=0.1, hess_init=1.0), 3)
        found.append(bnn.net_guide.state_dict())
    torch.testing.assert_close(found[0], found[1])


class WithoutEvents(tyxe.guides.Guide):
    """A guide of Normals whose elements are batch dimensions."""

    def __init__(self, module):
        super().__init__(module)
        self.loc = nn.Parameter(torch.zeros(()))

    def site_distribution(self, site):
        return dist.Normal(self.loc.expand(site.shape), 0.1)


def test_a_guide_without_event_dimensions_has_the_kl_of_one_with_them():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(15, scale=0.6)
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
    bnn = tyxe.VariationalBNN(nn.Linear(1, 2), prior, likelihood, WithoutEvents)
    history = bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=0.0), 2)
    one = td.kl_divergence(td.Normal(0.0, 0.1), td.Normal(0.0, 1.0)).item()
    assert history.kl == pytest.approx([4 * one] * 2)
