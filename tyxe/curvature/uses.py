"""Which linear maps a net uses its sites in, seen through the shared interception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tyxe.poutine import Draw, LinearMap, LinearMapMessenger

__all__ = ["Use", "UseRecorder", "patches", "positions", "windows"]


@dataclass(frozen=True)
class Use:
    """One linear map of a forward, and what has its output's gradient.

    Attributes:
        event: the map.
        probe: of the output's shape; its gradient is the output's, the pre-activation gradient.
        node: of the output in the graph.
    """

    event: LinearMap
    probe: Tensor
    node: Any

    @property
    def weight_site(self) -> str | None:
        """The site that is the weight as it is, or None: a plain tensor, or a part of a site."""
        return _whole_site(self.event.weight)

    @property
    def bias_site(self) -> str | None:
        """Likewise the bias."""
        return _whole_site(self.event.bias)

    @property
    def sites(self) -> list[str]:
        """All sites that enter, whole or in parts."""
        return [draw.name_of_site for draw in self.event.draws]

    @property
    def is_transposed(self) -> bool:
        """Whether the weight's first dimension counts inputs."""
        return self.event.kind.startswith("conv_transpose")

    @property
    def groups(self) -> int:
        """How many maps a grouped convolution is made of."""
        event = self.event
        if not event.spatial_dims:
            return 1
        channel = -1 - event.spatial_dims
        if self.is_transposed:
            return int(self.probe.shape[channel] // event.weight.shape[1])
        return int(event.input.shape[channel] // event.weight.shape[1])


def _whole_site(part: Tensor | None) -> str | None:
    return part.name_of_site if isinstance(part, Draw) and part.is_whole else None


class _Probed(torch.autograd.Function):
    """`output + probe` for a probe of zeros, at no cost.

    The output itself could not be differentiated at: an activation may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class UseRecorder(LinearMapMessenger):
    """Record every use of a site in a linear map, and the sites that are used in another way.

    Attributes:
        uses: in the order of the forward.
        elsewhere: names of sites whose value something else has read.
    """

    name = "curvature"
    treatment = "recorded"

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.elsewhere: set[str] = set()

    def answer(self, event: LinearMap) -> Tensor | None:
        """Compute the map at the sites' values, and add the probe."""
        output = event.at_values()
        probe = output.new_zeros(()).expand(output.shape).requires_grad_()
        found: Tensor = _Probed.apply(output, probe)
        self.uses.append(Use(event, probe, found.grad_fn))
        return found

    def _pyro_post_draw_value(self, msg: Any) -> None:
        self.elsewhere.add(msg["args"][0].name_of_site)


def positions(tensor: Tensor, use: Use, points: int) -> Tensor:
    """Bring an output of a map, or its gradient, to `(n, R, groups, features per group)`.

    Args:
        tensor: of the shape of the map's output.
        use: the map.
        points: number `n` of data points; the `R` others are positions that share the weight.
    """
    spatial = use.event.spatial_dims
    if spatial:
        rows = tensor.reshape(points, -1, *tensor.shape[-1 - spatial :]) if points else tensor
        # (n, further, channels, *positions)
        rows = rows.flatten(3).transpose(2, 3).flatten(1, 2)
    else:
        rows = _rows(tensor, use.event, points)
    return rows.unflatten(-1, (use.groups, -1))


def _rows(tensor: Tensor, event: LinearMap, points: int) -> Tensor:
    """The rows of a linear layer's input or output, `(n, R, features)`."""
    features = tensor.shape[-1]
    if event.rows_of_points_are_apart:
        return tensor.reshape(-1, points, features).transpose(0, 1)
    first = tensor.movedim(event.batch_dim, 0) if tensor.dim() > 1 else tensor
    return first.reshape(points, -1, features)


def patches(use: Use, points: int, with_one: bool = False) -> Tensor:
    """Return what the weight multiplies at each position: `(n, R, groups, fan_in)`.

    For a transposed convolution these are patches that the map itself picks when its weight is the
    identity: so every stride, padding and dilation is right.

    Args:
        use: the map.
        points: number `n` of data points.
        with_one: append the one that the bias multiplies.
    """
    event = use.event
    if event.spatial_dims and not use.is_transposed:
        return _patches_of(windows(event), points, use.groups, with_one)
    found = _picked(use, points) if event.spatial_dims else _rows(event.input, event, points)
    found = found if event.spatial_dims else found.unsqueeze(2)
    return torch.cat([found, found.new_ones(*found.shape[:-1], 1)], -1) if with_one else found


def _picked(use: Use, points: int) -> Tensor:
    event, groups, shape = use.event, use.groups, use.event.weight.shape
    inputs = shape[0] // groups
    fan = inputs * shape[2:].numel()
    pick = torch.eye(fan, dtype=event.input.dtype, device=event.input.device)
    pick = pick.view(fan, inputs, *shape[2:]).transpose(0, 1)
    pick = pick.repeat(groups, *[1] * (pick.dim() - 1))
    return positions(event.function(event.input, pick, None), use, points)


def _patches_of(windows: Tensor, points: int, groups: int, with_one: bool) -> Tensor:
    """Bring windows `(..., C, *kernel, *positions)` to `(n, R, groups, fan_in)`, in one copy.

    Positions are last in memory, as in the gradients that they meet.
    """
    spatial = (windows.dim() - 2) // 2
    channels, *kernel = windows.shape[-1 - 2 * spatial : -spatial]
    shape = windows.shape[-spatial:]
    split = windows.reshape(points, -1, groups, channels // groups, *kernel, *shape)
    fan = split.shape[3 : 4 + spatial].numel()
    found = windows.new_empty(*split.shape[:3], fan + with_one, *shape)
    found[:, :, :, :fan].unflatten(3, split.shape[3 : 4 + spatial]).copy_(split)
    found[:, :, :, fan:] = 1.0
    return found.flatten(4).permute(0, 1, 4, 2, 3).flatten(1, 2)


def windows(event: LinearMap) -> Tensor:
    """Return a view of what a convolution's kernel covers, `(..., C, *kernel, *positions)`.

    Args:
        event: a convolution that is not transposed.
    """
    dims = event.spatial_dims
    kernel = event.weight.shape[-dims:]
    positional = zip(("stride", "padding", "dilation"), event.args, strict=False)
    named = {**dict(positional), **event.kwargs}
    stride, dilation = (_each(named.get(name, 1), dims) for name in ("stride", "dilation"))
    x = F.pad(event.input.detach(), _pads(named.get("padding", 0), kernel, dilation))
    covered = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    counts = [
        (size - cover) // step + 1
        for size, cover, step in zip(x.shape[-dims:], covered, stride, strict=True)
    ]
    steps = x.stride()
    along_kernel = [s * d for s, d in zip(steps[-dims:], dilation, strict=True)]
    along_output = [s * step for s, step in zip(steps[-dims:], stride, strict=True)]
    return x.as_strided(
        (*x.shape[:-dims], *kernel, *counts), (*steps[:-dims], *along_kernel, *along_output)
    )


def _each(number: int | Sequence[int], dims: int) -> list[int]:
    """One number for each spatial dimension, however PyTorch was given them."""
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dims if len(numbers) == 1 else numbers


def _pads(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """What `F.pad` takes: the last dimension first, before and after."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif padding == "valid":
        pairs = [(0, 0)] * len(kernel)
    else:
        assert not isinstance(padding, str)
        pairs = [(pad, pad) for pad in _each(padding, len(kernel))]
    return [pad for pair in reversed(pairs) for pad in pair]
