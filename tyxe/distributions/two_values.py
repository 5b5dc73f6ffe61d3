"""Moments and KL of weights of two values in few passes, each as one node of the graph.

They are computed from the probability of the less likely value, `e = sigmoid(-|phi|)`, so that
nothing cancels: `e` is `(1 - |mean|) / 2`, the variance `4 e (1 - e)`, and minus the logarithm of
the likelier value's probability `-log1p(-e)`. Autograd would take 0 for the derivative of `|phi|`
at 0; the nodes' own gradients are correct there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tyxe.util import in_function_transform


def _less_likely(phi: Tensor) -> Tensor:
    return phi.abs().neg_().sigmoid_()


class _Moments(torch.autograd.Function):
    """Mean `s tanh(phi / 2)` and variance `4 s^2 e (1 - e)`; may be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, phi: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        e = _less_likely(phi)
        variance = torch.addcmul(e, e, e, value=-1).mul_(4 * scale**2)
        mean = e.mul_(-2 * scale).add_(scale).copysign_(phi)
        ctx.scale = scale
        ctx.save_for_backward(mean, variance)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> tuple[Tensor, None]:
        # d mean / d phi = variance / 2s, d variance / d phi = -variance mean / s
        mean, variance = ctx.saved_tensors
        gradient = (of_mean * (0.5 / ctx.scale)).addcmul_(mean, of_variance, value=-1 / ctx.scale)
        return gradient.mul_(variance), None


class _KL(torch.autograd.Function):
    """The KL for constant logits of the second; may be differentiated twice in those of the first.

    With `t = |phi|` and `u = sign(phi) phi0` it is `log sigmoid(t) - log sigmoid(u) - e (t - u)`,
    and `log sigmoid(u) = min(u, 0) + log sigmoid(|phi0|)`, whose last term is a single number if
    `phi0` is.
    """

    @staticmethod
    def forward(ctx: Any, phi: Tensor, phi0: Tensor) -> Tensor:
        ctx.save_for_backward(phi, phi0)
        difference = phi.abs()
        e = difference.neg().sigmoid_()
        u = torch.ones_like(phi).copysign_(phi).mul_(phi0)
        kl = e.neg().log1p_().addcmul_(e, difference.sub_(u), value=-1)
        return kl.sub_(u.clamp_(max=0)).sub_(_less_likely(phi0).neg_().log1p_())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        phi, phi0 = ctx.saved_tensors
        e = _less_likely(phi)
        return (phi - phi0).mul_(torch.addcmul(e, e, e, value=-1)).mul_(grad), None


def _as_one_node(*tensors: Tensor) -> bool:
    return not in_function_transform() and all(
        tensor.dtype in (torch.float32, torch.float64) for tensor in tensors
    )


def two_value_moments(phi: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance of weights `-s` and `s` with logits `phi`, in float32 at least."""
    if _as_one_node(phi):
        return _Moments.apply(phi, scale)
    positive, negative = torch.sigmoid(phi), torch.sigmoid(-phi)
    return scale * (positive - negative), positive * negative * (4 * scale**2)


def two_value_kl(phi: Tensor, phi0: Tensor) -> Tensor:
    """Return the KL of weights with logits `phi` from weights with logits `phi0`, in nats.

    `sigmoid(phi) (sp(-phi0) - sp(-phi)) + sigmoid(-phi) (sp(phi0) - sp(phi))`, with `sp` the
    softplus [T listing B.2]; `phi0` broadcasts to the shape of `phi`.
    """
    fits = torch.broadcast_shapes(phi.shape, phi0.shape) == phi.shape and phi.dtype == phi0.dtype
    if fits and not phi0.requires_grad and _as_one_node(phi, phi0):
        return _KL.apply(phi, phi0)
    # With sp(x) = x + sp(-x) this is sp(-phi0) - sp(-phi) - sigmoid(-phi) (phi - phi0), which takes
    # half of the passes. Nothing cancels if phi > 0, so that both signs are turned if phi < 0.
    sign = torch.copysign(torch.ones_like(phi), phi.detach())
    turned, turned0 = sign * phi, sign * phi0
    # PyTorch's softplus is the identity above 20; logsigmoid(x) = -sp(-x) is exact.
    return logsigmoid(turned) - logsigmoid(turned0) - torch.sigmoid(-turned) * (turned - turned0)
