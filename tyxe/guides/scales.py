"""Unconstrained parameters of positive scales, with or without a cap."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def uncapped(scale: Tensor, cap: float | None, names: tuple[str, str]) -> Tensor:
    """Return `r` with `scale = exp(r)`, or `scale = c sigmoid(r)` under a cap `c`, in float64.

    `names` are those of the two arguments in the message if a scale is not in range.
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
    """Return the logarithm of the scale: `r`, or under a cap `log(c sigmoid(r))`."""
    return unconstrained if cap is None else logsigmoid(unconstrained) + math.log(cap)
