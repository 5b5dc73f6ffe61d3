"""Every guide of ours keeps the contract, and the contract finds the faults of others."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.programs import program
from tyxe.guides import AutoNormal, Guide
from tyxe.testing import GUIDES, check_guide


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
