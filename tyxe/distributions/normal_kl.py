"""KL divergences of factorised Normals, without passes that nobody needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor

from tyxe.distributions.normal import FactorizedNormal, wide

__all__ = ["factorized_normal_kl", "joins", "joint_kl"]


def _scalar(tensor: Tensor) -> Tensor | None:
    """The one number that a tensor repeats without storing it again, or None."""
    if tensor.dim() == 0:
        return tensor
    if any(stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return None
    return tensor[(0,) * tensor.dim()] if tensor.numel() else None


def _sum_of_squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


# Scales beyond, whose squares leave float32, are left to the general formula.
_SMALLEST = 1e-18


class _ToOneNormal(NamedTuple):
    """What a joint KL needs for one tensor: the other Normal, and which spread is there."""

    loc: float
    variance: float
    log_scale: float
    has_variance: bool

    def centered(self, loc: Tensor) -> Tensor:
        return loc - self.loc if self.loc else loc


class _JointKL(torch.autograd.Function):
    """The KL of many tensors, each to a Normal with one mean and one scale, as a single node.

    Each tensor is read once on the way forward, and a gradient that is the same for all elements
    is never written out. It may be differentiated twice: what it saves keeps its graph.

    Args:
        terms: one for each tensor.
        tensors: all means, then all log-scales, then all scales or variances.
    """

    @staticmethod
    def forward(ctx: Any, terms: list[_ToOneNormal], *tensors: Tensor) -> Tensor:
        count = len(terms)
        locs, log_scales, spreads = (tensors[i * count : (i + 1) * count] for i in range(3))
        ctx.terms = terms
        ctx.save_for_backward(*tensors)
        # By the priors' variances: mostly one for all, and each operation on a number counts.
        squares: dict[float, Any] = {}
        rest: Any = 0.0
        constant = 0.0
        for term, loc, log_scale, spread in zip(terms, locs, log_scales, spreads, strict=True):
            square = _sum_of_squares(term.centered(loc))
            square += spread.sum() if term.has_variance else _sum_of_squares(spread)
            squares[term.variance] = square + squares.get(term.variance, 0.0)
            rest = rest - log_scale.sum()
            constant += loc.numel() * (term.log_scale - 0.5)
        for variance, square in squares.items():
            rest = torch.add(rest, square, alpha=0.5 / variance)
        kl: Tensor = rest + constant
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.terms)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        weights = {variance: grad / variance for variance in {t.variance for t in ctx.terms}}
        negative = -grad
        found: list[Tensor | None] = [None] * (3 * count)
        for i, term in enumerate(ctx.terms):
            loc, log_scale, spread = tensors[i::count]
            weight = weights[term.variance]
            if needed[i]:
                found[i] = term.centered(loc) * weight
            if needed[count + i]:
                found[count + i] = negative.expand_as(log_scale)
            if needed[2 * count + i]:
                half = (weight / 2).expand_as(spread) if term.has_variance else None
                found[2 * count + i] = spread * weight if half is None else half
        return None, *found


def _numbers(normal: td.Normal) -> tuple[float, float] | None:
    """Mean and scale of a Normal that repeats one of each, where the host has them; else None."""
    loc, scale = normal.loc, normal.scale
    # Reading a number off an accelerator would stop it; tensors of other classes may have none.
    if any(type(t) is not Tensor or t.device.type != "cpu" for t in (loc, scale)):
        return None
    one_loc, one_scale = _scalar(loc), _scalar(scale)
    if one_loc is None or one_scale is None:
        return None
    found = one_loc.item(), one_scale.item()
    return found if _SMALLEST <= found[1] <= 1 / _SMALLEST else None


def joins(q: td.Distribution, p: Any) -> bool:
    """Say whether a pair can be part of `joint_kl`.

    The first a `FactorizedNormal`, the second independent Normals of one fixed mean and scale, in
    one dtype of full precision, and none of torch.func's transforms at work.

    Example:
        >>> q = FactorizedNormal(torch.zeros(2), torch.zeros(2))
        >>> joins(q, dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        True
    """
    if not isinstance(q, FactorizedNormal) or not _is_one_event(p, q):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    normal = p.base_dist
    tensors = (q.loc, q.log_scale, normal.loc, normal.scale)
    if normal.loc.requires_grad or normal.scale.requires_grad:
        return False
    dtype = q.loc.dtype
    full = dtype in (torch.float32, torch.float64)
    return full and all(t.dtype == dtype for t in tensors) and _numbers(normal) is not None


def _is_one_event(p: Any, q: td.Distribution) -> bool:
    normals = isinstance(p, dist.Independent) and isinstance(p.base_dist, td.Normal)
    return normals and p.event_shape == q.event_shape and not p.batch_shape


def joint_kl(pairs: Sequence[tuple[FactorizedNormal, dist.Independent]]) -> Tensor:
    """Return the sum of the KLs of pairs that `joins`, in nats.

    Example:
        >>> q = FactorizedNormal(torch.ones(2), torch.zeros(2))
        >>> p = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        >>> joint_kl([(q, p), (q, p)])
        tensor(2.)
    """
    terms, spreads = [], []
    for q, p in pairs:
        spread, has_variance = q.scale_or_variance()
        numbers = _numbers(p.base_dist)
        assert numbers is not None
        loc, scale = numbers
        terms.append(_ToOneNormal(loc, scale**2, math.log(scale), has_variance))
        spreads.append(spread)
    locs, log_scales = [q.loc for q, _ in pairs], [q.log_scale for q, _ in pairs]
    kl: Tensor = _JointKL.apply(terms, *locs, *log_scales, *spreads)
    return kl


def factorized_normal_kl(q: FactorizedNormal, loc: Tensor, scale: Tensor) -> Tensor:
    r"""Return the KL from a factorised Normal to another, summed over elements, in nats.

    `sum 1/2 [(sigma^2 + (mu - m)^2)/s^2 - 1] + log s - log sigma` [VL 11].

    Args:
        q: the first.
        loc: means `m` of the second, of `q`'s shape.
        scale: standard deviations `s` of the second.

    Example:
        >>> q = FactorizedNormal(torch.ones(2), torch.zeros(2))
        >>> factorized_normal_kl(q, torch.zeros(2), torch.ones(2))
        tensor(1.)
    """
    quadratic = (((wide(q.loc) - loc).square() + q.variance) / wide(scale).square()).sum()
    return (quadratic - q.loc.numel()) / 2 + (wide(scale).log() - wide(q.log_scale)).sum()


@td.register_kl(FactorizedNormal, dist.Independent)
def _kl_factorized_independent(q: FactorizedNormal, p: dist.Independent) -> Tensor:
    if joins(q, p):
        return joint_kl([(q, p)])
    if _is_one_event(p, q):
        return factorized_normal_kl(q, p.base_dist.loc, p.base_dist.scale)
    plain = dist.Independent(q.base_dist, q.reinterpreted_batch_ndims, validate_args=False)
    return td.kl_divergence(plain, p)
