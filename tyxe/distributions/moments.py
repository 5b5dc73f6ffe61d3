"""Moments of distributions whose elements are independent, by registration.

Handlers that replace a draw by moments call these functions. Draws of a distribution that is not
registered are used as they are.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch.distributions as td
from torch import Tensor

from tyxe.util import at_least_float32


@singledispatch
def independent_moments(distribution: td.Distribution) -> tuple[Tensor, Tensor] | None:
    """Return elementwise `(mean, variance)` where sums of many elements are Gaussian, else None.

    Register a type for which `sum_i x_i w_i` may be replaced by the Gaussian of the same two
    moments: exactly for independent Normals, by the central limit theorem for others.

    Args:
        distribution: the posterior of one site, whose event shape is that of the weight.

    Example:
        >>> import torch
        >>> q = td.Independent(td.Normal(torch.zeros(2), torch.full((2,), 3.0)), 1)
        >>> independent_moments(q)
        (tensor([0., 0.]), tensor([9., 9.]))
    """
    return None


@independent_moments.register(td.Independent)
def _(distribution: td.Independent[td.Distribution]) -> tuple[Tensor, Tensor] | None:
    return independent_moments(distribution.base_dist)


@independent_moments.register
def _(distribution: td.Normal) -> tuple[Tensor, Tensor]:
    # The square of a small scale underflows in half precision.
    return distribution.loc, at_least_float32(distribution.scale).square()


@singledispatch
def center(distribution: td.Distribution) -> Tensor | None:
    """Return the centre about which independent elements are symmetric, or None.

    Flipout needs it: to flip the sign of `w - center` at random does not change the marginal
    distribution of an element.

    Example:
        >>> import torch
        >>> center(td.Laplace(torch.ones(2), torch.ones(2)))
        tensor([1., 1.])
    """
    return None


@center.register(td.Independent)
def _(distribution: td.Independent[td.Distribution]) -> Tensor | None:
    return center(distribution.base_dist)


@center.register(td.Normal)
@center.register(td.Laplace)
@center.register(td.StudentT)
@center.register(td.Cauchy)
def _(distribution: td.Normal | td.Laplace | td.StudentT | td.Cauchy) -> Tensor:
    return distribution.loc


@center.register
def _(distribution: td.Uniform) -> Tensor:
    return (distribution.low + distribution.high) / 2


@singledispatch
def deviation(distribution: td.Distribution) -> Tensor:
    """Draw `w - center`, for a distribution with a centre.

    Register a type that can draw it more cheaply than as a difference.

    Example:
        >>> import torch
        >>> deviation(td.Normal(torch.ones(2), torch.ones(2))).shape
        torch.Size([2])
    """
    middle: Any = center(distribution)
    draw = distribution.rsample if distribution.has_rsample else distribution.sample
    return draw() - middle


@singledispatch
def known_entropy(distribution: td.Distribution) -> Tensor | None:
    """Return the closed-form entropy of a posterior whose cross-entropy is to be sampled, or None.

    Register a posterior without a closed-form KL: only the other term of its KL is then estimated.

    Example:
        >>> import torch
        >>> known_entropy(td.Normal(torch.zeros(()), torch.ones(()))) is None
        True
    """
    return None
