"""The joint Normals of Pyro's autoguides, as distributions over sites."""

from __future__ import annotations

import functools
from typing import Any

import pyro.distributions as dist
import torch.distributions as td
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from torch import Tensor

from tyxe.distributions import JointNormal, PlainGroup, is_real
from tyxe.linalg import Cholesky, Inverse, LowRank, Operator

__all__ = ["independent_sites", "joint_normal"]


@functools.singledispatch
def covariance_of(guide: AutoGuide) -> Operator | None:
    """Return the covariance over all sites of a guide that is a joint Normal, else None.

    Register a guide of your own whose `get_posterior()` has that covariance and a `loc`.

    Args:
        guide: after its first call.
    """
    return None


@covariance_of.register
def _(guide: AutoMultivariateNormal) -> Operator:
    return Cholesky(guide.get_posterior().scale_tril)


@covariance_of.register
def _(guide: AutoLowRankMultivariateNormal) -> Operator:
    posterior = guide.get_posterior()
    return LowRank(posterior.cov_diag, posterior.cov_factor)


def joint_normal(guide: Any) -> JointNormal | None:
    """Return the posterior of a guide that is one Normal over all sites, with gradients, else None.

    Args:
        guide: one of Pyro's, after its first call.
    """
    if not isinstance(guide, AutoGuide) or not _all_real(guide):
        return None
    covariance = covariance_of(guide)
    if covariance is None:
        return None
    loc = guide.get_posterior().mean
    groups = [PlainGroup(name, value.shape) for name, value in _parts(guide, loc).items()]
    return JointNormal(groups, loc, Inverse(covariance))


def independent_sites(guide: Any) -> dict[str, td.Distribution] | None:
    """Return the Normal of each site of an `AutoDiagonalNormal`, or None for another guide.

    Args:
        guide: one of Pyro's, after its first call.
    """
    if not isinstance(guide, AutoDiagonalNormal) or not _all_real(guide):
        return None
    posterior = guide.get_posterior()
    locs, scales = _parts(guide, posterior.mean), _parts(guide, posterior.stddev)
    return {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}


def _all_real(guide: AutoGuide) -> bool:
    """Whether no site is transformed: the Normal is then over the sites themselves."""
    sites = guide.prototype_trace.iter_stochastic_nodes()
    return all(is_real(node["fn"].support) for _, node in sites)


def _parts(guide: Any, vector: Tensor) -> dict[str, Tensor]:
    """The parts of a vector over a guide's joint variable, by site, in their order."""
    return {site["name"]: part for site, part in guide._unpack_latent(vector)}
