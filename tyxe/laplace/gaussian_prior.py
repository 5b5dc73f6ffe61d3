"""Conversions between priors of sites and one Gaussian over blocks of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
import torch.distributions as td
from torch import Tensor

from tyxe.distributions import JointMarginal, JointNormal, ParamBlocks
from tyxe.distributions.joint_normal import GaussianJoint, NormalProduct
from tyxe.errors import warn
from tyxe.linalg import BlockDiagonal, Diagonal, Operator
from tyxe.linalg.checks import SMALL
from tyxe.linalg.permutation import permuted
from tyxe.linalg.sum import is_diagonal
from tyxe.priors.sites import SitePrior
from tyxe.util import at_least_float32

PriorPrecision = float | Tensor | Mapping[str, float | Tensor]


def gaussian_prior(
    priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor
) -> GaussianJoint:
    """Return the priors of all sites, given by joint name, as one Gaussian.

    Independent priors take the device of `like`, and its dtype if that is float32 at least.

    A prior that is not Gaussian, or couples some of the sites only, is a ValueError; so is a joint
    prior over too many weights in another order.
    """
    joints = {id(p.joint): p.joint for p in priors.values() if isinstance(p, JointMarginal)}
    if not joints:
        return factorized_prior(priors, blocks, like)
    found = list(joints.values())
    if not isinstance(found[0], GaussianJoint) or set(found[0].names) != set(blocks.sites):
        kinds = ", ".join(
            f"{type(joint).__name__} over {', '.join(joint.names)}" for joint in found
        )
        raise ValueError(
            "the Laplace approximation needs Gaussian priors, of each site or of all of them "
            f"together, but there is {kinds}"
        )
    return reordered(_lifted(found[0]), blocks)


def _lifted(prior: GaussianJoint) -> GaussianJoint:
    """Return a prior with tensors of float32 at least."""
    if prior.terms[0][0].dtype.itemsize >= 4:
        return prior
    terms = [(at_least_float32(m), operator.map(at_least_float32)) for m, operator in prior.terms]
    return of_terms(prior.blocks, terms, prior.absorbed)


def factorized_prior(
    priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor
) -> JointNormal:
    """Return Normals of each site as one over all sites, with a diagonal precision."""
    normals = {site: _normal(site, priors[site]) for site in blocks.sites}
    locs = {site: at_least_float32(normal.loc) for site, normal in normals.items()}
    precisions = {
        site: at_least_float32(normal.scale).square().reciprocal()
        for site, normal in normals.items()
    }
    keys = {site: getattr(priors[site], "absorbed", None) for site in blocks.sites}
    if len(set(keys.values())) > 1:
        without = ", ".join(site for site, key in keys.items() if key is None)
        warn(
            f"some sites' priors hold the data of an earlier fit, and {without or 'others'} "
            "do not: until the next fit these data are counted twice"
        )
    key = next(iter(keys.values())) if len(set(keys.values())) == 1 else None
    loc, diagonal = (
        blocks.flatten(values).to(at_least_float32(like)) for values in (locs, precisions)
    )
    return JointNormal(blocks, loc, _diagonal(blocks, diagonal), key)


def _diagonal(blocks: ParamBlocks, vector: Tensor) -> BlockDiagonal:
    parts = zip(blocks.names, vector.split(blocks.sizes), strict=True)
    return BlockDiagonal({name: Diagonal(part) for name, part in parts})


def _normal(site: str, prior: SitePrior) -> td.Normal:
    if isinstance(prior, JointMarginal):
        raise ValueError(
            f"the prior is one over all sites, the posterior of earlier data, and this takes "
            f"Normals of each: {site!r} has none"
        )
    base = prior.base_dist if isinstance(prior, td.Independent) else prior
    if not isinstance(base, td.Normal):
        kind = type(base).__name__ if isinstance(base, td.Distribution) else "hierarchical"
        raise ValueError(
            f"the Laplace approximation needs Gaussian priors, but that of {site!r} is "
            f"{kind}; use tyxe.priors.IIDPrior(dist.Normal(0, scale)), or VariationalBNN"
        )
    return base


def is_factorized(prior: GaussianJoint) -> TypeGuard[JointNormal]:
    """Say whether a Gaussian is one Normal for each weight."""
    return isinstance(prior, JointNormal) and is_diagonal(prior.precision)


def independent_terms(prior: GaussianJoint) -> tuple[Tensor, Tensor]:
    """Return mean and precision of each weight, `(P,)`, or raise if the prior couples weights."""
    if not is_factorized(prior):
        raise ValueError(
            "the prior is one over all sites, the posterior of earlier data, and this takes a "
            "precision of each weight: do it on the first task, before update_prior"
        )
    ((loc, precision),) = prior.terms
    return loc, precision.diagonal()


def reordered(prior: GaussianJoint, blocks: ParamBlocks) -> GaussianJoint:
    """Return a prior with its weights in the order of other blocks.

    Other sites, or coupled weights too many for a dense matrix, are a ValueError.
    """
    if prior.blocks == blocks:
        return prior
    if set(prior.names) != set(blocks.sites) or prior.blocks.size != blocks.size:
        raise ValueError(
            f"the prior has {prior.blocks.size} weights of {', '.join(prior.names)}; expected "
            f"{blocks.size} of {', '.join(blocks.sites)}"
        )
    size = prior.blocks.size
    dense = not is_factorized(prior)
    if dense and size > SMALL:
        raise ValueError(
            f"the joint prior has {size:,} weights in another order than the curvature's, "
            f"{', '.join(blocks.names)}, and a dense matrix in between takes at most {SMALL:,}: "
            "let the prior be the posterior of a LaplaceBNN of the same net"
        )
    positions = torch.arange(size, device=prior.terms[0][0].device)
    order = blocks.flatten(prior.unflatten(positions))
    if not dense:
        ((loc, precision),) = prior.terms
        diagonal = _diagonal(blocks, precision.diagonal()[order])
        return JointNormal(blocks, loc[order], diagonal, prior.absorbed)
    terms = [(loc[order], permuted(precision, order)) for loc, precision in prior.terms]
    return of_terms(blocks, terms, prior.absorbed)


def of_terms(
    blocks: ParamBlocks, terms: Sequence[tuple[Tensor, Operator]], absorbed: int | None
) -> GaussianJoint:
    """Return a Gaussian, or a product of several, from mean and precision of each."""
    factors = [JointNormal(blocks, loc, precision, absorbed) for loc, precision in terms]
    return factors[0] if len(factors) == 1 else NormalProduct(factors, absorbed)


def with_precision(prior: GaussianJoint, given: PriorPrecision, prefix: str) -> JointNormal:
    """Return a prior with independent weights, with other precisions about the same means.

    `given` is one precision for all weights, or a number or a tensor of the site's shape for each
    site, by its name with or without the prefix. Coupled weights, or a site without an entry, are a
    ValueError.
    """
    loc, _ = independent_terms(prior)
    known = {*prior.blocks.sites, *(site.removeprefix(prefix) for site in prior.blocks.sites)}
    if isinstance(given, Mapping) and (others := set(given) - known):
        raise ValueError(
            f"prior_precision has entries for {', '.join(sorted(others))}, which are no sites"
        )
    values = {
        site: torch.as_tensor(_of_site(given, site, prefix), dtype=loc.dtype, device=loc.device)
        for site in prior.blocks.sites
    }
    return JointNormal(prior.blocks, loc, _diagonal(prior.blocks, prior.blocks.flatten(values)))


def _of_site(given: PriorPrecision, site: str, prefix: str) -> float | Tensor:
    if not isinstance(given, Mapping):
        return given
    key = site if site in given else site.removeprefix(prefix)
    if key not in given:
        raise ValueError(f"prior_precision has no entry for {key!r}; it has {', '.join(given)}")
    return given[key]
