"""Every guide of ours keeps the contract, and the contract finds the faults of others."""

import functools

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tests.oracles.programs import program
from tyxe.distributions.joint import OneEvent
from tyxe.guides import AutoNormal, Guide
from tyxe.testing import GUIDES, check_guide
from tyxe.testing.asserts import check_density


@pytest.mark.parametrize("builder", GUIDES.values(), ids=GUIDES.keys())
def test_contract(builder):
    check_guide(builder)


@pytest.mark.parametrize("builder", GUIDES.values(), ids=GUIDES.keys())
def test_contract_on_positive_sites(builder):
    # Their transforms: every guide is a density on the support.
    check_guide(builder, program(nn.Linear(3, 2).double(), dist.Gamma(2.0, 2.0)))


class AutoLaplace(Guide):
    """Laplaces of scale 1."""

    def __init__(self, module):
        super().__init__(module)
        zeros = {site.own_name: torch.zeros(site.shape).double() for site in self.sites}
        self.locs = tyxe.util.SiteTensors(zeros)

    def site_distribution(self, site):
        loc = self.locs[site.own_name]
        return dist.Laplace(loc, torch.ones_like(loc)).to_event(loc.dim())


class Silent(AutoNormal):
    """Draws that Pyro does not hear of."""

    def forward(self, *args, **kwargs):
        return {name: q.rsample() for name, q in self.posterior().items()}


class Attached(AutoNormal):
    """Distributions that move on with the guide."""

    def get_detached_distributions(self, site_names=None):
        return {site.own_name: self.site_distribution(site) for site in self.sites}


class Unkind(AutoNormal):
    """No kinds of parameters."""

    def parameter_kinds(self):
        return {}


class Scaled(dist.Normal):
    """A Normal, of which subclasses get a part wrong."""

    def expand(self, batch_shape, _instance=None):
        return type(self)(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


class Unnormalised(Scaled):
    def log_prob(self, value):
        return super().log_prob(value) + 1.0


class Tempered(Scaled):
    def log_prob(self, value):
        return 3 * super().log_prob(value) + 7


class OtherMean(Scaled):
    @property
    def mean(self):
        return self.loc + self.scale / 4


class OtherKL(Scaled):
    pass


@td.register_kl(OtherKL, dist.Normal)
def _(q, p):
    return 25.0 - td.kl_divergence(dist.Normal(q.loc, q.scale), p)


@td.register_kl(Scaled, dist.Normal)
def _(q, p):
    return td.kl_divergence(dist.Normal(q.loc, q.scale), p)


class Own(AutoNormal):
    """A mean field of another class of distributions."""

    def __init__(self, module, distribution):
        super().__init__(module, init_scale=0.1)
        self.distribution = distribution

    def site_distribution(self, site):
        normal = super().site_distribution(site).base_dist
        return self.distribution(normal.loc, normal.scale).to_event(len(site.shape))


@pytest.mark.parametrize(
    ("distribution", "match"),
    [
        (Unnormalised, "does not integrate to 1"),
        (Tempered, "does not integrate to 1"),
        (OtherMean, "another mean than its `mean`"),
        (OtherKL, r"the KL registered for '0\.weight' is not"),
    ],
)
def test_the_contract_finds_distributions_that_are_not_those_of_draws(distribution, match):
    check_guide(functools.partial(Own, distribution=Scaled))
    with pytest.raises(AssertionError, match=match):
        check_guide(functools.partial(Own, distribution=distribution))


def heavy_tails(loc, scale):
    return dist.StudentT(3 + 10 * scale, loc, scale)


def beta(loc, scale):
    q = dist.Beta(2 + 10 * scale, 1 + loc.exp())
    return dist.TransformedDistribution(q, [td.AffineTransform(-1.0, 2.0)])


def without_gradient(loc, scale):
    return dist.StudentT(3 + 10 * scale.detach(), loc, scale)


def test_gradients_through_samplers_that_reject_are_checked():
    check_guide(functools.partial(Own, distribution=heavy_tails))
    check_guide(functools.partial(Own, distribution=beta))
    with pytest.raises(AssertionError, match="the gradient of a draw is not"):
        check_guide(functools.partial(Own, distribution=without_gradient))


class Modes(OneEvent):
    """Normals that are far apart."""

    def __init__(self, locs, scale):
        self.locs, self.scale = locs, scale
        super().__init__(torch.Size(), locs.shape[1:], validate_args=False)

    @property
    def mean(self):
        return self.locs.mean(0)

    def rsample(self, sample_shape=()):
        locs = self.locs[torch.randint(len(self.locs), tuple(sample_shape))]
        return locs + self.scale * torch.randn_like(locs)

    def log_prob(self, value):
        each = td.Independent(td.Normal(self.locs, self.scale), len(self.event_shape))
        equal = td.Categorical(torch.ones(len(self.locs)))
        return td.MixtureSameFamily(equal, each).log_prob(value)


@pytest.mark.parametrize("num_modes", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1,), (3, 2)])
def test_densities_with_several_modes_are_right(num_modes, shape):
    locs = torch.arange(num_modes).double().view(-1, *[1] * len(shape)).expand(-1, *shape)
    for seed in range(5):
        torch.manual_seed(seed)
        check_density(Modes(locs, 0.01), "modes")


@pytest.mark.parametrize(
    "q",
    [dist.Cauchy(0.0, 1.0), dist.StudentT(2.5), dist.Beta(0.5, 3.0), dist.HalfCauchy(1.0)],
    ids=["Cauchy", "Student t", "Beta", "half Cauchy"],
)
def test_densities_with_tails_and_bounds_are_right(q):
    for seed in range(5):
        torch.manual_seed(seed)
        check_density(q.expand([4]).to_event(1), "numbers")


def test_contract_of_a_guide_of_ones_own():
    check_guide(AutoLaplace)


@pytest.mark.parametrize(
    ("faulty", "match"),
    [
        (Silent, "the guide samples"),
        (Attached, "has a gradient"),
        (Unkind, "parameter_kinds leaves out"),
    ],
)
def test_the_contract_finds_faults(faulty, match):
    with pytest.raises(AssertionError, match=match):
        check_guide(faulty)
