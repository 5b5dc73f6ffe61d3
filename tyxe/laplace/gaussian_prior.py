"""Conversions between priors of sites and one Gaussian over blocks of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributions as td
from torch import Tensor

from tyxe import check
from tyxe.distributions import Gaussian, JointMarginal, ParamBlocks, as_gaussian
from tyxe.errors import warn
from tyxe.priors.sites import SitePrior
from tyxe.util import at_least_float32, without_events

PriorPrecision = float | Tensor | Mapping[str, float | Tensor]


def gaussian_prior(priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor) -> Gaussian:
    """Return the priors of all sites, given by joint name, as one Gaussian.

    Independent priors take the device of `like`, and its dtype if that is float32 at least.

    A prior that is not Gaussian, or couples some of the sites only, is a ValueError; so is a joint
    prior over too many weights in another order.
    """
    joints = {id(p.joint): p.joint for p in priors.values() if isinstance(p, JointMarginal)}
    if not joints:
        return _factorized_prior(priors, blocks, like)
    found = list(joints.values())
    if not isinstance(found[0], Gaussian) or set(found[0].names) != set(blocks.sites):
        kinds = ", ".join(f"{type(one).__name__} over {', '.join(one.names)}" for one in found)
        raise ValueError(
            "the Laplace approximation needs Gaussian priors, of each site or of all of them "
            f"together, but there is {kinds}"
        )
    prior = found[0]
    if prior.terms[0][0].dtype.itemsize < 4:
        prior = prior.map(at_least_float32)
    return prior.reordered(blocks)


def _factorized_prior(
    priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor
) -> Gaussian:
    """Return Normals of each site as one over all sites, with a diagonal precision."""
    normals = {site: _normal(site, priors[site]) for site in blocks.sites}
    locs = {site: at_least_float32(n.loc) for site, n in normals.items()}
    scales = {site: at_least_float32(n.scale) for site, n in normals.items()}
    precisions = {site: scale.square().reciprocal() for site, scale in scales.items()}
    keys = {site: getattr(priors[site], "absorbed", None) for site in blocks.sites}
    key, *others = set(keys.values())
    if others:
        without = ", ".join(site for site, own in keys.items() if own is None)
        warn(
            f"some sites' priors hold the data of an earlier fit, and {without or 'others'} "
            "do not: until the next fit these data are counted twice"
        )
        key = None
    like = at_least_float32(like)
    loc, diagonal = (blocks.flatten(values).to(like) for values in (locs, precisions))
    return Gaussian(blocks, loc, blocks.diagonal(diagonal), key)


def _normal(site: str, prior: SitePrior) -> td.Normal:
    normal: td.Normal | None = as_gaussian(prior)
    if normal is None:
        inner = without_events(prior)
        kind = type(inner).__name__ if isinstance(inner, td.Distribution) else "hierarchical"
        raise ValueError(
            f"the Laplace approximation needs Gaussian priors, but that of {site!r} is "
            f"{kind}; use tyxe.priors.IIDPrior(dist.Normal(0, scale)), or VariationalBNN"
        )
    return normal


def independent_terms(prior: Gaussian) -> tuple[Tensor, Tensor]:
    """Return mean and precision of each weight, `(P,)`, or raise if the prior couples weights."""
    if not prior.is_factorized:
        raise ValueError(
            "the prior is one over all sites, the posterior of earlier data, and this takes a "
            "precision of each weight: do it on the first task, before update_prior"
        )
    return prior.loc, prior.precision.diagonal()


def with_precision(prior: Gaussian, given: PriorPrecision, prefix: str) -> Gaussian:
    """Return a prior with independent weights, with other precisions about the same means.

    `given` is one precision for all weights, or a number or a tensor of the site's shape for each
    site, by its name with or without the prefix. Coupled weights, or other names, are a ValueError.
    """
    loc, _ = independent_terms(prior)
    sites = {site.removeprefix(prefix): site for site in prior.blocks.sites}
    if not isinstance(given, Mapping):
        given = dict.fromkeys(sites, given)
    found = {sites.get(name, name): value for name, value in given.items()}
    if set(found) != set(sites.values()):
        raise ValueError(
            f"prior_precision is for {', '.join(given)}; expected a number for each of "
            f"{', '.join(sites)}"
        )
    values = {
        site: check.tensor("prior_precision", value, dtype=loc.dtype, device=loc.device)
        for site, value in found.items()
    }
    for site, mean in prior.blocks.unflatten(loc).items():
        if values[site].numel() != 1:
            check.shape(f"prior_precision of {site}", values[site], mean.shape, ", or a number")
    return Gaussian(prior.blocks, loc, prior.blocks.diagonal(prior.blocks.flatten(values)))
