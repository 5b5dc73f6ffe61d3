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

from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.linalg import Cholesky, Inverse, LowRank, Operator
from tyxe.util import is_real


@functools.singledispatch
def covariance_of(guide: AutoGuide) -> Operator | None:
    """Return the covariance over all sites of a guide that is a joint Normal, else None.

    Register a guide of your own whose posterior has that covariance and the mean `guide.loc`. The
    guide has been called once.
    """
    return None


@covariance_of.register
def _(guide: AutoMultivariateNormal) -> Operator:
    return Cholesky(guide.get_posterior().scale_tril)


@covariance_of.register
def _(guide: AutoLowRankMultivariateNormal) -> Operator:
    # Not of `get_posterior()`, which factorises it, and waits to see whether that has gone well.
    return LowRank(guide.scale * guide.scale, guide.cov_factor * guide.scale.unsqueeze(-1))


def joint_normal(guide: Any) -> Gaussian | None:
    """Return the posterior of a guide that is one Normal over all sites, else None."""
    if not isinstance(guide, AutoGuide) or constrained_sites(guide):
        return None
    covariance = covariance_of(guide)
    if covariance is None:
        return None
    blocks = ParamBlocks.of_sites({n: part.shape for n, part in _parts(guide, guide.loc).items()})
    return Gaussian(blocks, guide.loc, Inverse(covariance))


def independent_sites(guide: Any) -> dict[str, td.Distribution] | None:
    """Return the Normal of each site of an `AutoDiagonalNormal`, or None for another guide."""
    if not isinstance(guide, AutoDiagonalNormal) or constrained_sites(guide):
        return None
    posterior = guide.get_posterior()
    locs, scales = _parts(guide, posterior.mean), _parts(guide, posterior.stddev)
    return {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}


def constrained_sites(guide: Any) -> dict[str, Any]:
    """Return the supports of an autoguide's sites that are not all real; none for other guides."""
    if not isinstance(guide, AutoGuide):
        return {}
    # AutoStructured and AutoGaussian keep no more than the names of their prototype's sites.
    nodes = guide.prototype_trace.nodes.items()
    sites = ((name, node) for name, node in nodes if node.get("type") == "sample")
    supports = {name: node["fn"].support for name, node in sites if not node["is_observed"]}
    return {name: support for name, support in supports.items() if not is_real(support)}


def _parts(guide: Any, vector: Tensor) -> dict[str, Tensor]:
    """Return the parts of a vector over a guide's joint variable, by site, in their order."""
    return {site["name"]: part for site, part in guide._unpack_latent(vector)}
