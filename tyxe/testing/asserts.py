"""Assertions whose messages name the rule that is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A standard normal exceeds this with probability 2e-9, which allows thousands of comparisons.
STANDARD_ERRORS = 6.0


def assert_close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-9) -> None:
    """Assert equality to a relative and absolute tolerance, of rounding in float64 by default."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol, msg=lambda details: f"{what}: {details}"
    )


def assert_within(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Assert that estimates agree with their expectations to within their standard errors.

    Where a standard error is 0 the estimate has to be exact.
    """
    allowed = STANDARD_ERRORS * error + 1e-6 * expected.abs().clamp_min(1e-6)
    excess = ((actual - expected).abs() / allowed).max().item()
    assert excess <= 1, (
        f"{what}: an estimate is {excess * STANDARD_ERRORS:.1f} standard errors away\n"
        f"estimated {actual}\nexpected {expected}"
    )


def assert_raises(error: type[Exception], function: Callable[[], Any], what: str) -> None:
    """Assert that a call raises an error of one kind."""
    try:
        function()
    except error:
        return
    raise AssertionError(f"{what}: expected {error.__name__}, but nothing was raised")
