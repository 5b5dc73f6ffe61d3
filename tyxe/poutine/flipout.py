"""Flipout, which gives each data point its own perturbation by random signs."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from tyxe import check
from tyxe.poutine.draw import Draw
from tyxe.poutine.linear_map import LinearMap, LinearMapMessenger


class flipout(LinearMapMessenger):
    r"""Decorrelate one weight draw over the batch by random signs.

    `h_n = lin(x_n; M, m_b) + s_n * lin(r_n * x_n; W - M, b - m_b)`, with signs `r_n`, `s_n` per
    data point and channel and one draw `W, b` per batch. Every output has the exact marginal
    distribution if the posterior factorises and is symmetric about its centre; weight and bias are
    independent and may share `s_n`. All positions of a data point share its signs, so their joint
    distribution is exact too. If a net flattens points and positions into rows (`x.flatten(0, 1)`),
    each row has its own signs, and only the marginals are exact.

    Args:
        batch_dim: which dimension counts data points, for linear layers with inputs of three or
            more dimensions: 1 for PyTorch's layers with `batch_first=False`. For attention it is
            known, and in convolutions it is the first.

    Raises:
        ValueError: `batch_dim` is not a dimension.

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

    name = "flipout"
    treatment = "flipped"

    def __init__(self, batch_dim: int = 0) -> None:
        super().__init__()
        hint = ", the dimension that counts points: 1 for layers with batch_first=False"
        self.batch_dim = check.count("batch_dim", batch_dim, 0, hint)

    def answer(self, event: LinearMap) -> Tensor | None:
        weight, bias = _centered(event.weight), _centered(event.bias)
        if weight is None or (event.bias is not None and bias is None):
            return None
        bias_center, bias_noise = (None, None) if bias is None else bias
        output = event.function(event.input, weight[0], bias_center)
        if weight[1] is not None:
            signed = event.input * self._signs_like(event.input, event)
            perturbation = event.function(signed, weight[1], bias_noise)
        elif bias_noise is not None:
            perturbation = bias_noise.reshape(-1, *[1] * event.spatial_dims).to(output.dtype)
        else:
            return output
        return torch.addcmul(output, perturbation, self._signs_like(output, event))

    def _signs_like(self, tensor: Tensor, event: LinearMap) -> Tensor:
        """Return random signs per data point and channel, constant over positions."""
        shape = [1] * tensor.dim()
        channel = tensor.dim() - 1 - event.spatial_dims
        shape[channel] = tensor.shape[channel]
        if event.points is not None and tensor.dim() == 2:
            # Rows are positions, one point after another.
            shape[0] = event.points
            signs = _random_signs(shape, tensor.dtype, tensor.device)
            return signs.repeat(len(tensor) // event.points, 1) if event.points else signs
        in_rows = event.spatial_dims or event.points is not None or channel < 2
        dim = event.batch_dim if in_rows else self.batch_dim
        if dim >= channel > 0:
            raise ValueError(
                f"flipout(batch_dim={dim}) met an output of shape {tuple(tensor.shape)}, whose "
                f"points are counted by a dimension before {channel}: give that one"
            )
        if dim < channel and event.points != 1:
            shape[dim] = tensor.shape[dim]
        return _random_signs(shape, tensor.dtype, tensor.device)


def _centered(part: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    if isinstance(part, Draw):
        middle = part.center()
        return None if middle is None else (middle, part.deviation())
    return None if part is None else (part, None)


@functools.cache
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the eight bits of each byte as signs, `(256, 8)`."""
    # A tensor as good as any other, wherever it is asked for first.
    with torch.inference_mode(False), disable_proxy_modes_tracing(), unset_fake_temporarily():
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
        return 1 - 2 * (bits & 1).to(dtype)


# The compiler ignores the cache, and that of torch 2.8 fails inside: it takes the table as it is.
@torch.compiler.assume_constant_result
def _constant_signs_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    return _signs_of_bytes(dtype, device)


def _random_signs(shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    # One random word has 64 signs, in a fifth of the time of a random number for each.
    count = math.prod(shape)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 64),), device=device)
    rows = words.view(torch.uint8).to(torch.int32)
    signs = _constant_signs_of_bytes(dtype, device).index_select(0, rows)
    return signs.view(-1)[:count].view(shape)
