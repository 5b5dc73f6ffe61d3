"""Automatic mixed precision, on devices that have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


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


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off on a tensor's device, for sums that half precision would spoil."""
    kind = tensor.device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if active else nullcontext()
