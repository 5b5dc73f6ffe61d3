"""What is dear: memory, foretold; factorisations, computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["SMALL", "check_small", "dense_bytes", "factorization"]

# Rows of a matrix that may be formed and factorised for an operator without an inverse of its own.
SMALL = 4096

T = TypeVar("T")


def dense_bytes(size: int, dtype: torch.dtype = torch.float32) -> int:
    """Return how many bytes a dense `size x size` matrix takes.

    Example:
        >>> dense_bytes(100_000) / 2**30  # in GiB
        37.25290298461914
    """
    return size * size * dtype.itemsize


def check_small(what: str, size: int, instead: str) -> None:
    """Raise for a dense matrix that an operator would need and is too large for.

    Args:
        what: needs it.
        size: number of rows.
        instead: what else to do.

    Raises:
        ValueError: there are more than `SMALL` rows.

    Example:
        >>> check_small("the inverse", 5000, "keep the average")
        Traceback (most recent call last):
        ValueError: the inverse takes a dense matrix, and 5,000 rows are more than 4,096: keep ...
    """
    if size > SMALL:
        raise ValueError(
            f"{what} takes a dense matrix, and {size:,} rows are more than {SMALL:,}: {instead}"
        )


def factorization(method: Callable[[Any], T]) -> functools.cached_property[T]:
    """Compute a property once, and so that gradients can run through it.

    What is computed first without gradients would otherwise be kept, and a later derivative be
    wrong without a word.

    Example:
        >>> class Squared(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.tensor(3.0))
        ...
        ...     @factorization
        ...     def value(self):
        ...         return self.weight.square()
        >>> squared = Squared()
        >>> with torch.no_grad():
        ...     _ = squared.value
        >>> squared.value
        tensor(9., grad_fn=<PowBackward0>)
    """

    @functools.wraps(method)
    def compute(self: Any) -> T:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(self)
        with torch.inference_mode(False), torch.enable_grad():
            return method(self)

    return functools.cached_property(compute)
