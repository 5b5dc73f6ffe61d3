"""Mean and covariance of a linearised net's outputs under a Normal guide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tyxe.curvature import Linearization, functional_covariance
from tyxe.curvature.output_covariance import covariance_through
from tyxe.guides.weight_covariance import weight_covariance
from tyxe.linalg import BlockDiagonal, Diagonal

__all__ = ["glm_outputs"]


@torch.no_grad()
def glm_outputs(guide: Any, linear: Linearization) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of outputs in the linearised net, `(n, ...)`, `(n, ..., C, C)`.

    Args:
        guide: a guide for which `weight_covariance` is registered.
        linear: the net linearised about the guide's means, on a batch.

    Raises:
        TypeError: the guide is not Normal.
    """
    covariance = weight_covariance(guide, linear.blocks)
    outputs = linear.outputs.detach()
    # A pruned weight has variance zero, and so no precision.
    if not isinstance(covariance, Diagonal) or not bool(covariance.entries.all()):
        return outputs, covariance_through(linear, covariance).detach()
    precisions = covariance.inverse_diagonal().split(linear.blocks.sizes)
    operators = {n: Diagonal(p) for n, p in zip(linear.blocks.names, precisions, strict=True)}
    return outputs, functional_covariance(linear, BlockDiagonal(operators)).detach()
