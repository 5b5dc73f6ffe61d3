"""A guide of one's own whose posterior is joint over the sites of a layer."""

import math

import pyro.distributions as dist
import torch
from torch import nn

from tests.oracles.inducing import data, make, program
from tyxe.bnn import elbo_terms
from tyxe.distributions import IndependentSites, JointDistribution
from tyxe.guides import Guide
from tyxe.priors import IIDPrior
from tyxe.testing import check_guide


class FullLayer(JointDistribution):
    """A full covariance over weight and bias of one linear layer, with a closed form."""

    def __init__(self, loc, scale_tril):
        self.loc, self.scale_tril = loc, scale_tril
        super().__init__(("net.weight", "net.bias"), loc.shape)

    @property
    def normal(self):
        return torch.distributions.MultivariateNormal(self.loc, scale_tril=self.scale_tril)

    @property
    def mean(self):
        return self.loc

    @property
    def variance(self):
        return self.normal.variance

    def rsample(self, sample_shape=()):
        return self.normal.rsample(sample_shape)

    def log_prob(self, value):
        return self.normal.log_prob(value)

    def unflatten(self, value):
        return {"net.weight": value[..., :-1].unsqueeze(-2), "net.bias": value[..., -1:]}

    def marginal_log_prob(self, name, value):
        own = slice(0, -1) if name == "net.weight" else slice(-1, None)
        covariance = self.normal.covariance_matrix[own, own]
        flat = value.flatten(-2) if name == "net.weight" else value
        return torch.distributions.MultivariateNormal(self.loc[own], covariance).log_prob(flat)


@torch.distributions.register_kl(FullLayer, IndependentSites)
def _kl(q, p):
    scales = [p.distributions[name].stddev.reshape(-1) for name in q.names]
    prior = torch.distributions.MultivariateNormal(
        torch.zeros_like(q.loc), scale_tril=torch.diag(torch.cat(scales))
    )
    return torch.distributions.kl_divergence(q.normal, prior)


class AutoFullLayer(Guide):
    """A guide of one joint posterior."""

    def __init__(self, module):
        super().__init__(module)
        self.loc = nn.Parameter(torch.zeros(3).double())
        self.scale = nn.Parameter(torch.eye(3).double())

    def joints(self):
        return [FullLayer(self.loc, self.scale.tril())]

    def site_distribution(self, site):
        raise NotImplementedError


def test_contract_of_a_joint_posterior_of_ones_own():
    check_guide(AutoFullLayer, program(nn.Linear(2, 1).double()))


def test_a_joint_posterior_with_a_closed_form_finds_the_exact_posterior():
    x, y = data(20)
    prior = IIDPrior(dist.Normal(0.0, 2.0))
    bnn = make(AutoFullLayer, nn.Linear(2, 1).double(), prior, size=20)
    inputs = torch.cat([x, torch.ones(20, 1).double()], 1)
    precision = inputs.mT @ inputs / 0.5**2 + torch.eye(3).double() / 4
    covariance = torch.linalg.inv(precision)
    mean = covariance @ inputs.mT @ y[:, 0] / 0.5**2
    guide = bnn.net_guide
    with torch.no_grad():
        guide.loc.copy_(mean)
        guide.scale.copy_(torch.linalg.cholesky(covariance))
    # At the posterior the ELBO of a draw, with log-densities, is the evidence whatever the draw.
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(20).double(), 4 * inputs @ inputs.mT + 0.25 * torch.eye(20).double()
    ).log_prob(y[:, 0])
    for _ in range(3):
        terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=False)
        torch.testing.assert_close(terms.data - terms.kl, evidence, rtol=1e-8, atol=1e-8)
    # So is, on average, that with the closed form: its error is that of the data term alone.
    draws = [elbo_terms(bnn.model, bnn.guide, x, y) for _ in range(100)]
    assert len({terms.kl.item() for terms in draws}) == 1
    elbos = torch.stack([terms.data - terms.kl for terms in draws]).detach()
    assert abs(elbos.mean() - evidence) < 6 * elbos.std() / math.sqrt(len(elbos))
