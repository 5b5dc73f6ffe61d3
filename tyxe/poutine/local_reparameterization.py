"""Local reparameterisation: linear maps are sampled by the moments of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.errors import warn
from tyxe.poutine.draw import Draw
from tyxe.poutine.linear_map import LinearMap, LinearMapMessenger, tell_of_derivatives

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
        event: the map, with an input of any shape that it takes.
        weight: mean and variance of the weight; a variance of None if it is not random.
        bias: mean and variance of the bias, or None if the map has none.
        variance_dtype: type in which variances are summed; by default that of the weight's
            variance.

    Returns:
        `(mean, variance)`, each of the output's shape; the variance is float32 at least, also
        under autocast, where a squared scale would underflow, and None if nothing is random.
    """
    bias_mean, bias_var = (None, None) if bias is None else bias
    mean = event.function(event.input, weight[0], bias_mean)
    weight_var = weight[1]
    if weight_var is None and bias_var is None:
        return mean, None
    if weight_var is None:
        # Only the bias is random, and it is the same at every position.
        assert bias_var is not None
        return mean, bias_var.reshape(-1, *[1] * event.spatial_dims).expand_as(mean)
    with full_precision(event.input):
        dtype = variance_dtype or weight_var.dtype
        squared = event.input.to(weight_var.dtype).square().to(dtype)
        bias_var = None if bias_var is None else bias_var.to(dtype)
        variance = event.function(squared, weight_var.to(dtype), bias_var)
        return mean, variance.to(weight_var.dtype)


class local_reparameterization(LinearMapMessenger):
    r"""Sample linear maps by their outputs: `h = lin(x; M, m_b) + sqrt(lin(x^2; V, v_b)) eps`.

    Every output element has the exact mean and variance (and, for Normal posteriors, the exact
    distribution). Its noise is independent between data points, which lowers the variance of the
    ELBO's gradient; the weights are never drawn. Unlike with plain draws, the positions of one
    feature map, and several uses of one weight, get independent noise.

    Around `fit` it changes the gradient estimator, around `predict` the predictive samples.
    Derivatives of such outputs with respect to the inputs do not belong to any draw of the weights.
    Do not use this handler for a net that returns them, such as the gradient of an energy. A
    forward that differentiates gives a warning.

    Args:
        variance_dtype: type in which the map of variances is computed. `torch.bfloat16` is faster
            if the hardware has it. It rounds squared inputs and variances to 8 bits, so an output's
            standard deviation has an error of up to 0.6 %, or half of that for a sum of many terms
            (its mean is exact).

    Raises:
        ValueError: a type with less range than float32.

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

    name = "local_reparameterization"
    treatment = "moments"

    @check.arguments
    def __init__(self, variance_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        known = (None, torch.bfloat16, torch.float32, torch.float64)
        hint = ": squares of small scales underflow in others"
        check.choice("variance_dtype", variance_dtype, known, hint)
        self.variance_dtype = variance_dtype

    def answer(self, event: LinearMap) -> Tensor | None:
        weight, bias = _moments(event.weight), _moments(event.bias)
        if weight is None or (event.bias is not None and bias is None):
            return None
        mean, variance = local_reparameterization_moments(event, weight, bias, self.variance_dtype)
        if variance is None:
            return mean
        # An all-zero input has variance 0, where the square root's gradient is infinite. Other
        # variances do not change, because the smallest normal number is below their rounding.
        scale = (variance + torch.finfo(variance.dtype).tiny).sqrt()
        noise = torch.randn_like(scale)
        output = torch.addcmul(mean.to(scale.dtype), scale, noise).to(mean.dtype)
        if event.input.requires_grad:
            tell_of_derivatives(output, _warn_of_derivatives)
        return output


def _warn_of_derivatives() -> None:
    warn(
        "local_reparameterization samples the outputs of linear maps, and the net differentiates "
        "these in its inputs inside of its forward: such a derivative is none of a draw of the "
        "weights, and has another variance. Leave the handler for this net; flipout's derivatives "
        "are right"
    )


def _moments(part: Tensor | None) -> Moments | None:
    if isinstance(part, Draw):
        return part.moments()
    return None if part is None else (part, None)
