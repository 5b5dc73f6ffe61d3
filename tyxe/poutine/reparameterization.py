"""Local reparameterisation and flipout: two ways to sample a linear map with less variance."""

from __future__ import annotations

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
    event: LinearMap, weight: Moments, bias: Moments | None
) -> tuple[Tensor, Tensor | None]:
    r"""Return mean and variance of each output of a linear map with random weights.

    `mean = lin(x; M, m_b)` and `var = lin(x^2; V, v_b)`, where `lin` keeps the map's stride,
    padding, dilation and groups [T 5.1.4; Kingma, Salimans, Welling 2015, eq. 6].

    Args:
        event: the map; its input is of any shape that the map takes.
        weight: mean and variance of the weight (None: not random).
        bias: likewise for the bias, or None where the map has none.

    Returns:
        `(mean, variance)`, each of the output's shape; the variance is float32 at least, also
        under autocast, where a squared scale would underflow. It is None if nothing is random.
    """
    bias_mean, bias_var = (None, None) if bias is None else bias
    mean = event.function(event.input, weight[0], bias_mean)
    weight_var = weight[1]
    if weight_var is None and bias_var is None:
        return mean, None
    device = event.input.device.type
    with torch.autocast(device, enabled=False):
        if weight_var is None:
            # Only the bias is random: it adds its variance to every position.
            assert bias_var is not None
            return mean, bias_var.reshape(-1, *[1] * event.spatial_dims).expand_as(mean)
        squared = event.input.to(weight_var.dtype).square()
        return mean, event.function(squared, weight_var, bias_var)


class LocalReparameterizationMessenger(LinearMapMessenger):
    """Sample the outputs of linear maps instead of their weights; see the function."""

    name = "local_reparameterization"
    treatment = "moments"

    def answer(self, event: LinearMap) -> Tensor | None:
        """Draw each output from its own Gaussian."""
        weight, bias = _moments(event.weight), _moments(event.bias)
        if weight is None or (event.bias is not None and bias is None):
            return None
        mean, variance = local_reparameterization_moments(event, weight, bias)
        if variance is None:
            return mean
        # An all-zero input has variance 0, where the square root's gradient is infinite.
        scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
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
            signs_in = _signs_like(event.input, event)
            perturbation = event.function(event.input * signs_in, weight[1], None)
            output = torch.addcmul(output, perturbation, _signs_like(output, event))
        if bias_noise is not None:
            shaped = bias_noise.reshape(-1, *[1] * event.spatial_dims).to(output.dtype)
            output = torch.addcmul(output, shaped, _signs_like(output, event))
        return output


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
    signs = torch.randint(0, 2, shape, device=tensor.device, dtype=torch.int8)
    return signs.to(tensor.dtype).mul_(2).sub_(1)


def local_reparameterization() -> LocalReparameterizationMessenger:
    r"""Sample linear maps by their outputs: `h = lin(x; M, m_b) + sqrt(lin(x^2; V, v_b)) eps`.

    Exact first two moments (and law, for Normal posteriors) of every output element, with noise
    independent between data points, which lowers the variance of the ELBO's gradient; the
    weights themselves are never drawn. What differs from plain draws: positions of one feature
    map, and several uses of one weight, get independent noise.

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
    return LocalReparameterizationMessenger()


def flipout() -> FlipoutMessenger:
    r"""Decorrelate one weight draw over the batch by random signs.

    `h_n = lin(x_n; M, m_b) + s_n * lin(r_n * x_n; W - M) + s'_n * (b - m_b)`, with signs `r_n`,
    `s_n`, `s'_n` per data point and channel and one draw `W, b` per batch. The marginal law of
    every output is exact for any factorised posterior that is symmetric about its centre. The
    first dimension of a batched input counts data points.

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
