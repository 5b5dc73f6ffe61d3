"""Online Laplace: a posterior as the next prior, and which curvature it has absorbed."""

from __future__ import annotations

import hashlib
import struct

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor

from tyxe.curvature import Curvature
from tyxe.distributions import JointNormal
from tyxe.distributions.joint_normal import GaussianJoint, product_of
from tyxe.errors import warn


def key_of(curvature: int, weight: float) -> int:
    """Return the key of a curvature that is multiplied by a weight, from its own."""
    digest = hashlib.blake2b(struct.pack("qd", curvature, weight), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


def prior_of_tasks(
    prior: GaussianJoint, loc: Tensor, curvature: Curvature, weight: float, key: int
) -> GaussianJoint:
    """Return a prior times a term for the newest task, about `loc` and with its curvature."""
    factors = [JointNormal(curvature.blocks, m, a) for m, a in prior.terms]
    if not curvature.is_empty:
        factors.append(JointNormal(curvature.blocks, loc, curvature.operator.scaled(weight)))
    return product_of(factors, key)


def warn_of_copy(old: GaussianJoint, new: GaussianJoint, loc: Tensor) -> None:
    """Warn if a new prior is about the mode, and does not say that it holds the curvature there."""
    if new.absorbed is not None or len(new.terms) > 1:
        return
    mean = new.terms[0][0]
    # A prior may be about the mode from the start, and only its precisions be tuned.
    if torch.equal(mean, loc.to(mean)) and not torch.equal(mean, old.terms[0][0].to(mean)):
        warn(
            "the new prior's means are the posterior's own, but it does not say that it holds "
            "these data, which count twice then: pass what net_guide.get_detached_distributions() "
            "returns, not copies of its numbers"
        )


class AbsorbingNormal(dist.Independent):
    """Independent Normals over one site, from a posterior that contains a curvature.

    A Laplace approximation with independent weights becomes a prior as one of these for each site.
    `absorbed` is the key of the curvature, which is then not added a second time.
    """

    absorbed: int | None = None

    @classmethod
    def of(cls, loc: Tensor, scale: Tensor, absorbed: int | None) -> AbsorbingNormal:
        """Return the Normals of a site, with all dimensions in the event."""
        normal = cls(dist.Normal(loc, scale), loc.dim())
        normal.absorbed = absorbed
        return normal


def normals_of(prior: JointNormal) -> dict[str, td.Distribution]:
    """Return a Gaussian with independent weights as Normals, by the sites' joint names."""
    locs = prior.unflatten(prior.loc)
    scales = prior.unflatten(prior.precision.inverse_diagonal().sqrt())
    return {
        site: AbsorbingNormal.of(loc, scales[site], prior.absorbed) for site, loc in locs.items()
    }
