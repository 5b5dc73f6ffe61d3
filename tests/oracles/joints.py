"""Priors over all sites of small nets, and the steps of VCL on them."""

import functools

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.nn as nn
from pyro.infer import autoguide

import tyxe
from tyxe.distributions import Gaussian, JointDistribution, ParamBlocks
from tyxe.linalg import Dense
from tyxe.priors import DictPrior, IIDPrior
from tyxe.testing import GUIDES

EXACT = {"rtol": 1e-8, "atol": 1e-8}
SCALE, NOISE = 1.3, 0.5


def normal_prior():
    return IIDPrior(dist.Normal(torch.tensor(0.0), torch.tensor(SCALE)))


def four_lines(bnn):
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    posterior = bnn.net_guide.get_detached_distributions(sites)
    bnn.update_prior(DictPrior(posterior))
    return posterior


def vcl(builder=autoguide.AutoMultivariateNormal, net=None):
    net = nn.Linear(2, 1) if net is None else net
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    return tyxe.VariationalBNN(net, normal_prior(), likelihood, builder)


def guide_joint(bnn):
    trace = poutine.trace(bnn.net_guide).get_trace()
    (node,) = (n for n in trace.nodes.values() if isinstance(n.get("fn"), JointDistribution))
    return node["fn"]


INDUCING = {
    f"AutoInducing, {q}": functools.partial(
        tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, q_inducing=q, everywhere=True
    )
    for q in ("diagonal", "full", "matrix", "ensemble")
}


INDUCING["AutoInducing, hierarchical"] = functools.partial(
    tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, everywhere=True, hierarchical=(1, 1)
)


# A point is no prior.
SPREAD = [name for name in GUIDES if name != "pyro AutoDelta"]


def joint_prior(net, seed=0):
    """A dense Normal over all sites of a net, by marginal."""
    torch.manual_seed(seed)
    blocks = ParamBlocks.of_sites({f"net.{n}": p.shape for n, p in net.named_parameters()})
    size = blocks.size
    rows = torch.randn(2 * size, size)
    joint = Gaussian(blocks, torch.randn(size), Dense(rows.mT @ rows / size))
    return joint, DictPrior({name: joint.marginal(name) for name in joint.names})


def small_net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
