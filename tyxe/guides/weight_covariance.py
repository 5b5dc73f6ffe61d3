"""The covariance of a Normal guide's weights, by registration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributions as td

from tyxe.distributions import Gaussian, ParamBlocks, center, independent_moments
from tyxe.guides.base import Guide
from tyxe.guides.pyro_guide import PyroGuide
from tyxe.linalg import Diagonal, Inverse, Operator
from tyxe.linalg.functions import permuted


@functools.singledispatch
def weight_covariance(guide: Any, blocks: ParamBlocks) -> Operator:
    """Return the covariance of a Normal guide's weights; register other such guides here.

    Args:
        guide: a guide of mean-field or joint Normals, ours or Pyro's.
        blocks: the linearised net's blocks, whose order the weights take.

    Raises:
        TypeError: the guide is not Normal.
    """
    raise TypeError(
        f"{type(guide).__name__} has no Normal posterior to linearise about: predict with "
        "predictive='bnn', or use tyxe.guides.AutoNormal"
    )


@weight_covariance.register
def _(guide: Guide, blocks: ParamBlocks) -> Operator:
    return _of_sites(guide.posterior(), blocks)


@weight_covariance.register
def _(guide: PyroGuide, blocks: ParamBlocks) -> Operator:
    for name, support in guide.constrained_sites().items():
        raise TypeError(
            f"the posterior of {name!r} is no Normal, but one transformed to the support "
            f"{support}: predict with predictive='bnn'"
        )
    return _of_sites(guide.as_priors(), blocks)


def _of_sites(posterior: Mapping[str, td.Distribution], blocks: ParamBlocks) -> Operator:
    joint = getattr(next(iter(posterior.values())), "joint", None)
    if isinstance(joint, Gaussian) and set(joint.names) == set(posterior):
        order = torch.arange(joint.loc.numel(), device=joint.loc.device)
        precision = joint.precision
        covariance = precision.operator if isinstance(precision, Inverse) else Inverse(precision)
        return permuted(covariance, blocks.flatten(joint.unflatten(order)))
    variances = {}
    for name, q in posterior.items():
        moments = independent_moments(q)
        if moments is None or center(q) is None:
            raise TypeError(
                f"the posterior of {name!r} is no Normal, so the net cannot be linearised under "
                "it: predict with predictive='bnn', or use tyxe.guides.AutoNormal"
            )
        variances[name] = moments[1].to(moments[0].dtype)
    return Diagonal(blocks.flatten(variances))
