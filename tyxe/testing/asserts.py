"""Assertions that say what was expected of whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_close", "assert_raises", "assert_within"]

# A standard normal exceeds this with probability 2e-9: enough for thousands of comparisons.
STANDARD_ERRORS = 6.0


def assert_close(actual: Tensor, expected: Tensor, what: str, rtol: float = 1e-9) -> None:
    """Assert equality up to rounding in float64.

    Args:
        actual: what the part returned.
        expected: what the contract asks for.
        what: says which rule this is.
        rtol: relative tolerance; also the absolute one.
    """
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol, msg=lambda details: f"{what}: {details}"
    )


def assert_within(actual: Tensor, expected: Tensor, error: Tensor, what: str) -> None:
    """Assert that estimates are as near to the truth as their standard errors allow.

    Args:
        actual: Monte Carlo estimates.
        expected: what they estimate.
        error: their standard errors; where one is 0 the estimate has to be exact.
        what: says which rule this is.
    """
    allowed = STANDARD_ERRORS * error + 1e-6 * expected.abs().clamp_min(1e-6)
    excess = ((actual - expected).abs() / allowed).max().item()
    assert excess <= 1, (
        f"{what}: an estimate is {excess * STANDARD_ERRORS:.1f} standard errors away\n"
        f"estimated {actual}\nexpected {expected}"
    )


def assert_raises(error: type[Exception], function: Callable[[], Any], what: str) -> None:
    """Assert that a call raises an error of one kind.

    Args:
        error: the kind.
        function: makes the call.
        what: says which rule this is.
    """
    try:
        function()
    except error:
        return
    raise AssertionError(f"{what}: expected {error.__name__}, but nothing was raised")
