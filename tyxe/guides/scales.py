"""Positive parameters, with or without a cap, as unconstrained ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

__all__ = ["capped_log", "uncapped"]


def uncapped(scale: Tensor, cap: float | None, names: tuple[str, str]) -> Tensor:
    """Return the unconstrained `r` of a scale: `exp(r)`, or `c sigmoid(r)` under a cap `c`.

    Args:
        scale: positive numbers below the cap.
        cap: the largest scale, or None.
        names: of the two arguments, for errors.

    Raises:
        ValueError: a scale that is not positive, or not below the cap.

    Example:
        >>> uncapped(torch.tensor([1.0]), 2.0, ("init_scale", "max_guide_scale"))
        tensor([0.], dtype=torch.float64)
    """
    scale = scale.double()
    if not bool((scale > 0).all()):
        raise ValueError(f"{names[0]} is {scale.min().item()}; expected positive numbers")
    if cap is None:
        return scale.log()
    ratio = scale / cap
    if bool((ratio >= 1).any()):
        raise ValueError(f"{names[0]} {scale.max().item()} is not below {names[1]} {cap}")
    return torch.logit(ratio)


def capped_log(unconstrained: Tensor, cap: float | None) -> Tensor:
    """Return the logarithm of the scale: smooth, so that one near its cap still has a gradient.

    Example:
        >>> capped_log(torch.zeros(1), 2.0)
        tensor([0.])
    """
    return unconstrained if cap is None else logsigmoid(unconstrained) + math.log(cap)
