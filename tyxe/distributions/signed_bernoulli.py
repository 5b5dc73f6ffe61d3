"""Weights of two values: their distribution, its relaxation, and a prior of its probabilities.

Moments and KL take few passes, each as one node of the graph. They are computed from the
probability of the less likely value, `e = sigmoid(-|phi|)`, so that nothing cancels: `e` is
`(1 - |mean|) / 2`, the variance `4 e (1 - e)`, and minus the logarithm of the likelier value's
probability `-log1p(-e)`. Autograd would take 0 for the derivative of `|phi|` at 0; the nodes' own
gradients are correct there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all, clamp_probs
from torch.nn.functional import logsigmoid

from tyxe import check
from tyxe.distributions.buffered import unexpanded
from tyxe.distributions.normal import independent_moments
from tyxe.util import at_least_float32, in_function_transform


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


class Signs(constraints.Constraint):
    """The support of the two values `-scale` and `scale`."""

    is_discrete = True
    event_dim = 0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def check(self, value: Tensor) -> Tensor:
        return value.abs() == self.scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signs) and other.scale == self.scale

    def __hash__(self) -> int:
        return hash(self.scale)

    def __repr__(self) -> str:
        return f"Signs({self.scale:g})"


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor * scale


class SignedBernoulli(dist.TorchDistribution):
    r"""A weight of two values: `P(w = s) = sigmoid(phi)`, else `w = -s`.

    The mean is `s tanh(phi / 2)`, the variance `4 s^2 sigmoid(phi) sigmoid(-phi)` (in float32 at
    least), which does not round to 0 at `phi = 40`, as `4 pi (1 - pi)` does. A draw has no
    gradient; sums of many such weights are Gaussian by the central limit theorem, and
    `local_reparameterization` samples those.

    Args:
        logits: `phi`, of any shape.
        scale: `s`; 1 by default, `1 / sqrt(fan_in)` for outputs of unit scale.
        validate_args: whether to check logits and values, as in `torch.distributions`.

    Raises:
        ValueError: a scale that is not positive.

    Reference:
        [T] 4.1.

    Example:
        >>> q = SignedBernoulli(torch.tensor([0.0, 40.0]))
        >>> q.mean, q.variance
        (tensor([0., 1.]), tensor([1.0000e+00, 1.6993e-17]))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"logits": constraints.real}
    has_enumerate_support = True

    def __init__(
        self, logits: Tensor | float, scale: float = 1.0, validate_args: bool | None = None
    ) -> None:
        self.scale = check.number("scale", scale, above=0)
        self.logits: Tensor
        (self.logits,) = broadcast_all(logits)
        super().__init__(self.logits.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: object = None) -> SignedBernoulli:
        # A copy, because it keeps the attributes that a subclass adds.
        new = copy.copy(self)
        new.logits = self.logits.expand(batch_shape)
        td.Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
        return new

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        return Signs(self.scale)

    @property
    def probs(self) -> Tensor:
        """Probability of the positive value."""
        return torch.sigmoid(self.logits)

    @property
    def mean(self) -> Tensor:
        return _scaled(torch.tanh(self.logits / 2), self.scale)

    @property
    def mode(self) -> Tensor:
        """The more probable value, which is also the median; the positive one if they are equal."""
        positive = torch.full_like(self.logits, self.scale)
        return torch.where(self.logits < 0, -positive, positive)

    @property
    def variance(self) -> Tensor:
        phi = at_least_float32(self.logits)
        return torch.sigmoid(phi) * torch.sigmoid(-phi) * (4 * self.scale**2)

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        with torch.no_grad():
            probs = self.probs.expand(self._extended_shape(torch.Size(sample_shape)))
            positive = torch.rand_like(probs) < probs
            return positive.to(probs.dtype).mul_(2 * self.scale).sub_(self.scale)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return `log sigmoid(phi)` or `log sigmoid(-phi)`; minus infinity outside the support."""
        if self._validate_args:
            self._validate_sample(value)
        inside = logsigmoid(value.sign() * self.logits)
        return torch.where(Signs(self.scale).check(value), inside, -math.inf)

    def entropy(self) -> Tensor:
        phi = self.logits
        negative = torch.sigmoid(phi) * logsigmoid(phi) + torch.sigmoid(-phi) * logsigmoid(-phi)
        return -negative

    def enumerate_support(self, expand: bool = True) -> Tensor:
        ones = [1] * len(self.batch_shape)
        values = self.logits.new_tensor([-self.scale, self.scale]).reshape(2, *ones)
        return values.expand(2, *self.batch_shape) if expand else values


class RelaxedSignedBernoulli(SignedBernoulli):
    """A `SignedBernoulli` whose differentiable draws lie between the two values.

    `w = s tanh((phi + L) / (2 T))` with `L` logistic. The sign of a draw is an exact draw, and so
    is the draw itself as the temperature `T` goes to 0. Moments, log-probabilities and KL remain
    those of the two values, so an ELBO with these draws is biased, the less the lower the
    temperature.

    Reference:
        Maddison, Mnih, Teh, The concrete distribution, 2017, eq. 14.
    """

    has_rsample = True

    def __init__(
        self,
        logits: Tensor | float,
        temperature: float,
        scale: float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        self.temperature = check.number("temperature", temperature, above=0)
        super().__init__(logits, scale, validate_args)

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        uniform = clamp_probs(torch.rand(shape, dtype=self.logits.dtype, device=self.logits.device))
        noisy = self.logits + uniform.log() - (-uniform).log1p()
        return _scaled(torch.tanh(noisy / (2 * self.temperature)), self.scale)


class SignedBetaBernoulli(SignedBernoulli):
    r"""Two values whose probability `pi` has the prior `Beta(1 + delta, 1 + delta)`.

    As a distribution of `w` alone both values are equally likely. As a prior of a
    `SignedBernoulli` posterior it regularises that posterior's *probabilities*: instead of a KL,
    `-delta log pi (1 - pi)` is registered, minus the log-density of `pi` up to a constant. The
    objective is then maximum a posteriori in `pi`, and not a bound on the evidence. The other
    arguments are those of `SignedBernoulli`.

    Args:
        delta: 0 for no regulariser; larger values keep probabilities away from 0 and 1.

    Raises:
        ValueError: a delta that is negative, or a scale that is not positive.

    Reference:
        [T 4.12].

    Example:
        >>> q = SignedBernoulli(torch.tensor(0.0))
        >>> td.kl_divergence(q, SignedBetaBernoulli(1.0))  # log 4
        tensor(1.3863)
    """

    def __init__(self, delta: float, scale: float = 1.0, validate_args: bool | None = None) -> None:
        delta = check.number("delta", delta, least=0)
        # A tensor, so that a module that holds the distribution saves and loads it.
        self.delta = torch.tensor(delta, dtype=torch.float64, device="cpu")
        super().__init__(0.0, scale, validate_args)


@independent_moments.register
def _(distribution: SignedBernoulli) -> tuple[Tensor, Tensor]:
    # By the central limit theorem [T 4.3, alg. 1].
    mean, variance = two_value_moments(at_least_float32(distribution.logits), distribution.scale)
    return mean.to(distribution.logits.dtype), variance


def _same_values(q: SignedBernoulli, p: SignedBernoulli, divergence: Tensor) -> Tensor:
    return divergence if q.scale == p.scale else torch.full_like(divergence, math.inf)


@td.register_kl(SignedBernoulli, SignedBernoulli)
def _kl_signed_signed(q: SignedBernoulli, p: SignedBernoulli) -> Tensor:
    kl = two_value_kl(q.logits, unexpanded(p.logits))
    return _same_values(q, p, kl.expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape)))


@td.register_kl(SignedBernoulli, SignedBetaBernoulli)
def _penalty_signed_beta(q: SignedBernoulli, p: SignedBetaBernoulli) -> Tensor:
    # delta (sp(-phi) + sp(phi)) [T 4.12], where sp(-phi) + sp(phi) = |phi| + 2 sp(-|phi|).
    size = q.logits.abs()
    penalty = p.delta.to(size.dtype) * (size - 2 * logsigmoid(size))
    return _same_values(q, p, penalty)


# --------------------------------------------------------------------------- one bit a weight

_BYTE = 8


@dataclass(frozen=True)
class PackedSigns:
    """`S` samples of one tensor of `P` elements, each of which is `-scale` or `scale`.

    `bits` has the shape `(S, ceil(P / 8))`, with the first element of a byte in its lowest bit.
    """

    bits: Tensor
    shape: torch.Size
    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, scale: float = 1.0) -> PackedSigns:
        """Pack samples, `(S, ...)`, of `-scale` and `scale`."""
        positive = (values > 0).flatten(1) if values.dim() > 1 else (values > 0)[:, None]
        missing = -positive.shape[1] % _BYTE
        padded = torch.nn.functional.pad(positive, (0, missing)).unflatten(1, (-1, _BYTE))
        bits = (padded << _places(values.device)).sum(-1).to(torch.uint8)
        return cls(bits, values.shape[1:], scale, values.dtype)

    def __getitem__(self, sample: int) -> Tensor:
        positive = (self.bits[sample][:, None] >> _places(self.bits.device)) & 1
        signs = positive.flatten()[: math.prod(self.shape)].reshape(self.shape).to(self.dtype)
        return signs.mul_(2 * self.scale).sub_(self.scale)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the samples take."""
        return self.bits.numel()


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BYTE, device=device)


@dataclass(frozen=True)
class PackedSamples:
    """Samples of all sites of a net, by joint name; iterate for values by site."""

    sites: Mapping[str, PackedSigns]

    def __len__(self) -> int:
        return len(next(iter(self.sites.values())).bits)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        return {name: packed[sample] for name, packed in self.sites.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[sample] for sample in range(len(self)))

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the samples take."""
        return sum(packed.num_bytes for packed in self.sites.values())
