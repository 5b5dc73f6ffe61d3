"""KL divergences of factorised Normals, in few passes over the tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from tyxe.distributions.normal import FactorizedNormal, PrunedNormal, as_gaussian
from tyxe.util import at_least_float32, in_function_transform


def _scalar(tensor: Tensor) -> Tensor | None:
    """Return the one number that an expanded tensor repeats, or None."""
    if tensor.dim() == 0:
        return tensor
    if any(stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return None
    return tensor.as_strided((), ()) if tensor.numel() else None


# Squares of smaller scales (and of scales above the inverse) are outside of float32's range.
_SMALLEST = 1e-18


class ToOneNormal(NamedTuple):
    """Mean and scale of a Normal that has the same for all elements."""

    loc: float
    scale: float

    def centered(self, loc: Tensor) -> Tensor:
        """Return the difference to the mean."""
        return loc - self.loc if self.loc else loc


def _value(terms: Sequence[tuple[ToOneNormal, bool]], tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of KLs in nats, for use without gradients; arguments are those of the node."""
    # Summed by the priors' scales, of which there are few: each operation on a number costs.
    squares: dict[float, Any] = {}
    rest: Any = 0.0
    constant = 0.0
    for i, (p, has_variance) in enumerate(terms):
        loc, log_scale, spread = tensors[i :: len(terms)]
        square = p.centered(loc).square().sum()
        square += spread.sum() if has_variance else spread.square().sum()
        rest = rest - log_scale.sum()
        constant += loc.numel() * (math.log(p.scale) - 0.5)
        squares[p.scale] = square + squares.get(p.scale, 0.0)
    for scale, square in squares.items():
        rest = torch.add(torch.as_tensor(rest), square, alpha=0.5 / scale**2)
    return rest + constant


class _FusedKL(torch.autograd.Function):
    """The KL of many tensors, each to a Normal with one mean and one scale, as a single node.

    `terms` has for each tensor the other Normal, and whether its variances are given; `tensors` are
    all means, then all log-scales, then all scales or variances. The forward pass reads each tensor
    once, and the backward pass does not store a gradient that is the same for all elements. It may
    be differentiated twice, because the saved tensors keep their graph.
    """

    @staticmethod
    def forward(ctx: Any, terms: list[tuple[ToOneNormal, bool]], *tensors: Tensor) -> Tensor:
        ctx.terms = terms
        ctx.save_for_backward(*tensors)
        return _value(terms, tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.terms)
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        weights = {scale: grad / scale**2 for scale in {p.scale for p, _ in ctx.terms}}
        negative = -grad
        found: list[Tensor | None] = [None] * (3 * count)
        for i, (p, has_variance) in enumerate(ctx.terms):
            loc, log_scale, spread = tensors[i::count]
            weight = weights[p.scale]
            if needed[i]:
                found[i] = p.centered(loc) * weight
            if needed[count + i]:
                found[count + i] = negative.expand_as(log_scale)
            if needed[2 * count + i]:
                half = (weight / 2).expand_as(spread)
                found[2 * count + i] = half if has_variance else spread * weight
        return None, *found


class _Known(NamedTuple):
    """The numbers of a Normal, with the tensors that they were read from and their versions."""

    loc: Tensor
    scale: Tensor
    versions: tuple[int, int]
    one: ToOneNormal | None

    def still_holds(self, loc: Tensor, scale: Tensor) -> bool:
        same = self.loc is loc and self.scale is scale
        return same and self.versions == (loc._version, scale._version)


# Reading a number in every step would wait for the accelerator. Changes in place are noticed by the
# tensors' versions, except for those made through `.data`.
_KNOWN: weakref.WeakKeyDictionary[td.Normal, _Known] = weakref.WeakKeyDictionary()


def known_numbers(normal: td.Normal) -> ToOneNormal | None:
    """Return mean and scale of a Normal that has the same for all elements, or None."""
    loc, scale = normal.loc, normal.scale
    if not (_is_readable(loc) and _is_readable(scale)):
        return None
    known = _KNOWN.get(normal)
    if known is None or not known.still_holds(loc, scale):
        known = _Known(loc, scale, (loc._version, scale._version), _read(loc, scale))
        _KNOWN[normal] = known
    return known.one


def _is_readable(tensor: Tensor) -> bool:
    # Tensor subclasses and meta tensors may have no numbers, and inference tensors no versions. A
    # program takes the tensor, and not its numbers.
    if get_proxy_mode() is not None:
        return False
    return type(tensor) is Tensor and not (tensor.is_meta or tensor.is_inference())


def _read(loc: Tensor, scale: Tensor) -> ToOneNormal | None:
    one_loc, one_scale = _scalar(loc), _scalar(scale)
    if one_loc is None or one_scale is None:
        return None
    found = ToOneNormal(one_loc.item(), one_scale.item())
    return found if _SMALLEST <= found.scale <= 1 / _SMALLEST else None


def fusable(q: td.Distribution, p: Any) -> ToOneNormal | None:
    """Return the mean and scale of `p` for `fused_kl`, or None where that does not apply.

    `q` has to be a `FactorizedNormal`, and `p` independent Normals of one constant mean and scale,
    in one dtype of full precision and outside of torch.func's transforms.
    """
    if not isinstance(q, FactorizedNormal) or q.log_scale.dtype != q.loc.dtype:
        return None
    return _one_normal(p, q.loc)


def _one_normal(p: Any, like: Tensor) -> ToOneNormal | None:
    """Return the mean and scale that a distribution repeats over a tensor's shape, or None."""
    normal = _one_event(p, like.shape)
    if normal is None or in_function_transform():
        return None
    if normal.loc.requires_grad or normal.scale.requires_grad:
        return None
    full = like.dtype in (torch.float32, torch.float64)
    same = normal.loc.dtype == normal.scale.dtype == like.dtype
    return known_numbers(normal) if full and same else None


def _one_event(p: Any, shape: torch.Size) -> Any:
    """Return independent Normals that are one event of a shape, else None."""
    return as_gaussian(p) if p.event_shape == shape and not p.batch_shape else None


def log_density(p: td.Distribution, value: Tensor) -> Tensor:
    """Return `log p(value)`, in one pass if `p` repeats one Normal over the value's shape."""
    one = _one_normal(p, value)
    if one is None:
        return p.log_prob(value)
    constant = value.numel() * (math.log(one.scale) + math.log(2 * math.pi) / 2)
    return one.centered(value).square().sum() * (-0.5 / one.scale**2) - constant


def fused_kl(pairs: Sequence[tuple[FactorizedNormal, ToOneNormal]]) -> Tensor:
    """Return the sum of the KLs of pairs, in nats, from what `fusable` returned for each."""
    spreads, have_variances = zip(*(q.scale_or_variance() for q, _ in pairs), strict=True)
    terms = [(p, has) for (_, p), has in zip(pairs, have_variances, strict=True)]
    locs, log_scales = [q.loc for q, _ in pairs], [q.log_scale for q, _ in pairs]
    return _FusedKL.apply(terms, *locs, *log_scales, *spreads)


def factorized_normal_kl(
    q: FactorizedNormal, loc: Tensor, scale: Tensor, kept: Tensor | None = None
) -> Tensor:
    """Return the KL from a factorised Normal to another, summed over elements, in nats.

    `sum 1/2 [(sigma^2 + (mu - m)^2)/s^2 - 1] + log s - log sigma` [VL 11], `m` and `s` of `q`'s
    shape, and of the elements that are `kept` where some are not.
    """
    scale = at_least_float32(scale)
    quadratic = ((at_least_float32(q.loc) - loc).square() + q.variance) / scale.square()
    logs = scale.log() - at_least_float32(q.log_scale)
    if kept is not None:
        return (((quadratic - 1) / 2 + logs) * kept).sum()
    return (quadratic.sum() - q.loc.numel()) / 2 + logs.sum()


@td.register_kl(FactorizedNormal, dist.Independent)
def _kl_factorized_independent(q: FactorizedNormal, p: dist.Independent) -> Tensor:
    one = fusable(q, p)
    if one is not None:
        return fused_kl([(q, one)])
    normal = _one_event(p, q.event_shape)
    if normal is not None:
        return factorized_normal_kl(q, normal.loc, normal.scale)
    plain = dist.Independent(q.base_dist, q.reinterpreted_batch_ndims, validate_args=False)
    return td.kl_divergence(plain, p)


@td.register_kl(PrunedNormal, dist.Independent)
def _kl_pruned_independent(q: PrunedNormal, p: dist.Independent) -> Tensor:
    normal = _one_event(p, q.event_shape)
    if normal is None:
        raise NotImplementedError
    return factorized_normal_kl(q.base, normal.loc, normal.scale, q.kept)
