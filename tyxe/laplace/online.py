"""Online Laplace: a posterior as the next prior, and which curvature it has absorbed."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian
from tyxe.errors import warn


def key_of(curvature: int, weight: float) -> int:
    """Return the key of a curvature that is multiplied by a weight, from its own."""
    digest = hashlib.blake2b(struct.pack("qd", curvature, weight), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


def prior_of_tasks(
    prior: Gaussian, loc: Tensor, curvature: Curvature, weight: float, key: int
) -> Gaussian:
    """Return a prior times a term for the newest task, about `loc` and with its curvature."""
    terms = [*prior.terms]
    if not curvature.is_empty:
        terms.append((loc, curvature.operator.scaled(weight)))
    return Gaussian.product(curvature.blocks, terms, key)


def warn_of_copy(old: Gaussian, new: Gaussian, loc: Tensor) -> None:
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
