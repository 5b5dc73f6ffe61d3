"""Quadratic penalties about the weights of earlier tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GaussianPenalty:
    r"""`1/2 sum_i lambda_i (w_i - m_i)^2`: minus the log-density of a Normal, up to a constant.

    `means` are `m` and `precisions` `lambda`, by name. The caller decides whether to add the
    penalty to a sum or to a mean over data.

    Raises:
        ValueError: names or shapes differ; a negative precision.
    """

    means: Mapping[str, Tensor]
    precisions: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        shapes, others = ({n: v.shape for n, v in p.items()} for p in (self.means, self.precisions))
        if shapes != others:
            raise ValueError(f"means have the shapes {shapes}, precisions {others}; expected equal")
        for name, precision in self.precisions.items():
            if bool((precision < 0).any()):
                raise ValueError(f"the precision of {name!r} is negative; expected 0 or more")

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the penalty of weights by name, differentiable in them."""
        squares = [
            (self.precisions[name] * (values[name] - mean).square()).sum()
            for name, mean in self.means.items()
        ]
        return torch.stack(squares).sum() / 2

    def gradient(self, name: str, value: Tensor) -> Tensor:
        """Return `lambda (w - m)` of one weight."""
        return self.precisions[name] * (value - self.means[name])
