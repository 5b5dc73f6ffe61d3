"""Properties that are computed at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def factorization(method: Callable[[Any], T]) -> functools.cached_property[T]:
    """Compute a property once, with a graph of gradients even where gradients are off.

    Otherwise a value that is first used without gradients would be kept, and later derivatives
    would be wrong without an error.
    """

    @functools.wraps(method)
    def compute(self: Any) -> T:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(self)
        with torch.inference_mode(False), torch.enable_grad():
            return method(self)

    return functools.cached_property(compute)
