"""Programs that sample a net under a prior, for the tests of guides."""

import pyro.distributions as dist
import torch.nn as nn

from tyxe.priors import IIDPrior
from tyxe.priors.sites import SitePriors

NORMAL = dist.Normal(0.0, 1.0)


def program(net=None, prior=NORMAL, **rules):
    net = nn.Linear(3, 2) if net is None else net
    return SitePriors(IIDPrior(prior, **rules).sites(net), net)
