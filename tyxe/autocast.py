"""Automatic mixed precision, on devices that have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# The rounding of numbers with ten bits after the first.
TF32 = 2.0**-10


def autocast_like(tensor: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """Return autocast on a tensor's device, with the settings that are active now."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    return functools.partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


def dtype_of_maps(weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear map of this weight runs now."""
    kind = weight.device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if active else weight.dtype


def rounding_of_maps(weight: Tensor) -> float:
    """Return the relative rounding with which a linear map of this weight runs now, at most.

    NVIDIA's GPUs may round the factors of products in float32 to TF32, and in convolutions they do
    so by default.
    """
    dtype = dtype_of_maps(weight)
    if weight.device.type == "cuda" and dtype == torch.float32:
        return TF32
    return torch.finfo(dtype).eps


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether a tensor is another but for rounding; what is not finite is not compared."""
    tolerance = rounding_of_maps(expected) ** 0.4
    error, size = (found - expected).norm(), expected.norm()
    return bool(error <= tolerance * (size + tolerance)) or not bool(size.isfinite())


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on a tensor's device, for sums that half precision would spoil."""
    kind = tensor.device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if active else nullcontext()
