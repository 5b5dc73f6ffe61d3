"""Local reparameterisation and flipout: two ways to sample a linear map with less variance."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tyxe.poutine.draw import Draw
from tyxe.poutine.linear_map import LinearMap, LinearMapMessenger

__all__ = [
    "FlipoutMessenger",
    "LocalReparameterizationMessenger",
    "flipout",
    "local_reparameterization",
    "local_reparameterization_moments",
]

Moments = tuple[Tensor, Tensor | None]


def local_reparameterization_moments(
    event: LinearMap,
    weight: Moments,
    bias: Moments | None,
    variance_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Return mean and variance of each output of a linear map with random weights.

    `mean = lin(x; M, m_b)` and `var = lin(x^2; V, v_b)`, where `lin` keeps the map's stride,
    padding, dilation and groups [T 5.1.4; Kingma, Salimans, Welling 2015, eq. 6].

    Args:
        event: the map; its input is of any shape that the map takes.
        weight: mean and variance of the weight (None: not random).
        bias: likewise for the bias, or None where the map has none.
        variance_dtype: in which variances are summed; that of the weight's variance by default.

    Returns:
        `(mean, variance)`, each of the output's shape; the variance is float32 at least, also
        under autocast, where a squared scale would underflow. It is None if nothing is random.
    """
    bias_mean, bias_var = (None, None) if bias is None else bias
    mean = event.function(event.input, weight[0], bias_mean)
    weight_var = weight[1]
    if weight_var is None and bias_var is None:
        return mean, None
    if weight_var is None:
        # Only the bias is random: it adds its variance to every position.
        assert bias_var is not None
        return mean, bias_var.reshape(-1, *[1] * event.spatial_dims).expand_as(mean)
    with _without_autocast(event.input.device.type):
        squared = event.input.to(weight_var.dtype).square()
        if variance_dtype is None:
            return mean, event.function(squared, weight_var, bias_var)
        narrow = weight_var.to(variance_dtype)
        narrow_bias = None if bias_var is None else bias_var.to(variance_dtype)
        variance = event.function(squared.to(variance_dtype), narrow, narrow_bias)
        return mean, variance.to(weight_var.dtype)


def _has_range(dtype: torch.dtype) -> bool:
    """Whether a type reaches as far down as float32."""
    return dtype.is_floating_point and torch.finfo(dtype).tiny <= torch.finfo(torch.float32).tiny


def _without_autocast(device: str) -> AbstractContextManager[None]:
    active = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if active else nullcontext()


class LocalReparameterizationMessenger(LinearMapMessenger):
    """Sample the outputs of linear maps instead of their weights; see the function."""

    name = "local_reparameterization"
    treatment = "moments"

    def __init__(self, variance_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if variance_dtype is not None and not _has_range(variance_dtype):
            raise ValueError(
                f"variance_dtype is {variance_dtype}; expected torch.bfloat16 or a wider "
                "floating-point type: squares of small scales underflow in others"
            )
        self.variance_dtype = variance_dtype

    def answer(self, event: LinearMap) -> Tensor | None:
        """Draw each output from its own Gaussian."""
        weight, bias = _moments(event.weight), _moments(event.bias)
        if weight is None or (event.bias is not None and bias is None):
            return None
        mean, variance = local_reparameterization_moments(event, weight, bias, self.variance_dtype)
        if variance is None:
            return mean
        # An all-zero input has variance 0, where the square root's gradient is infinite. Any other
        # variance is not changed: the smallest normal number is far below its rounding.
        scale = (variance + torch.finfo(variance.dtype).tiny).sqrt()
        noise = torch.randn_like(scale)
        return torch.addcmul(mean.to(scale.dtype), scale, noise).to(mean.dtype)


def _moments(part: Tensor | None) -> Moments | None:
    if isinstance(part, Draw):
        return part.moments()
    return None if part is None else (part, None)


class FlipoutMessenger(LinearMapMessenger):
    """Flip the signs of one weight perturbation per data point; see the function."""

    name = "flipout"
    treatment = "flipped"

    def answer(self, event: LinearMap) -> Tensor | None:
        """Add the flipped perturbation to the map at the posterior's centre."""
        weight, bias = _centered(event.weight), _centered(event.bias)
        if weight is None or (event.bias is not None and bias is None):
            return None
        bias_center, bias_noise = (None, None) if bias is None else bias
        output = event.function(event.input, weight[0], bias_center)
        if weight[1] is not None:
            signed = event.input * _signs_like(event.input, event)
            perturbation = event.function(signed, weight[1], bias_noise)
        elif bias_noise is not None:
            perturbation = bias_noise.reshape(-1, *[1] * event.spatial_dims).to(output.dtype)
        else:
            return output
        return torch.addcmul(output, perturbation, _signs_like(output, event))


def _centered(part: Tensor | None) -> Moments | None:
    if isinstance(part, Draw):
        middle = part.center()
        return None if middle is None else (middle, part.deviation())
    return None if part is None else (part, None)


def _signs_like(tensor: Tensor, event: LinearMap) -> Tensor:
    """Random signs per data point and channel, constant over positions."""
    shape = [1] * tensor.dim()
    channel = tensor.dim() - 1 - event.spatial_dims
    shape[channel] = tensor.shape[channel]
    if event.batch_dim < channel:
        shape[event.batch_dim] = tensor.shape[event.batch_dim]
    return _random_signs(shape, tensor.dtype, tensor.device)


def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight bits of each byte, as signs, `(256, 8)`."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return 1 - 2 * (bits & 1).to(dtype)


def _random_signs(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # A random word is 64 signs: a fifth of the time that a random number for each would take.
    count = math.prod(shape)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 64),), device=device)
    rows = words.view(torch.uint8).to(torch.int32)
    signs = _signs_of_bytes(dtype, device).index_select(0, rows)
    return signs.view(-1)[:count].view(shape)


def local_reparameterization(
    variance_dtype: torch.dtype | None = None,
) -> LocalReparameterizationMessenger:
    r"""Sample linear maps by their outputs: `h = lin(x; M, m_b) + sqrt(lin(x^2; V, v_b)) eps`.

    Exact first two moments (and law, for Normal posteriors) of every output element, with noise
    independent between data points, which lowers the variance of the ELBO's gradient; the
    weights themselves are never drawn. What differs from plain draws: positions of one feature
    map, and several uses of one weight, get independent noise.

    Args:
        variance_dtype: type in which the map of variances is computed. `torch.bfloat16` is faster
            where the hardware has it; squared inputs and variances are then rounded to 8 bits, so
            that a standard deviation of an output is off by up to 0.6 %, and half of that for a sum
            of many terms (its mean is exact).

    Raises:
        ValueError: a type with less range than float32.

    Returns:
        A context manager and decorator. Around `fit` it changes the gradient estimator, around
        `predict` the predictive samples.

    Reference:
        [T] 5.1.4; Kingma, Salimans, Welling, Variational dropout and the local
        reparameterization trick, 2015.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> net = torch.nn.Linear(2, 1)
        >>> bnn = tyxe.VariationalBNN(
        ...     net, tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
        >>> with local_reparameterization():
        ...     samples = bnn.predict(torch.randn(5, 2), num_predictions=3, aggregate=False)
        >>> samples.shape
        torch.Size([3, 5, 1])
    """
    return LocalReparameterizationMessenger(variance_dtype)


def flipout() -> FlipoutMessenger:
    r"""Decorrelate one weight draw over the batch by random signs.

    `h_n = lin(x_n; M, m_b) + s_n * lin(r_n * x_n; W - M, b - m_b)`, with signs `r_n`, `s_n` per
    data point and channel and one draw `W, b` per batch. The marginal law of every output is
    exact for any factorised posterior that is symmetric about its centre: weight and bias being
    independent, they may share `s_n`. The first dimension of a batched input counts data points.

    Returns:
        A context manager and decorator.

    Reference:
        Wen, Vicol, Ba, Tran, Grosse, Flipout: efficient pseudo-independent weight perturbations
        on mini-batches, 2018, eq. 3-4.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
        >>> with flipout():
        ...     samples = bnn.predict(torch.randn(5, 2), num_predictions=3, aggregate=False)
        >>> samples.shape
        torch.Size([3, 5, 1])
    """
    return FlipoutMessenger()
