"""The covariance of outputs given data at the same points, for data of any precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tyxe.linalg.checks import cholesky

__all__ = ["ConditionedKernel"]

# The zero that rounding makes of a class Hessian's smallest eigenvalue is far below this.
NEGLIGIBLE = 1e-8


@dataclass(frozen=True, eq=False)
class ConditionedKernel:
    r"""The covariance of outputs given data of precision `D` at the same points, in float64.

    `K - K G K` with `G = R (I + R^T K R)^-1 R^T` and `D = R R^T`: for an invertible `D` that is
    `(K^-1 + D)^-1`, and `G = (K + D^-1)^-1`; a singular one, such as that of classes, is as good.

    Attributes:
        kernel: `K`, of all outputs of all points, `(N K, N K)`.
        hessians: the blocks of `D`, `(N, R, C, C)`.

    Example:
        >>> prior = torch.eye(1, dtype=torch.float64)
        >>> given = ConditionedKernel(prior, torch.full((1, 1, 1, 1), 3.0).double())
        >>> round((prior - prior @ given.explained(prior)).item(), 10)  # 1 / (1 + 3)
        0.25
    """

    kernel: Tensor
    hessians: Tensor

    @cached_property
    def root(self) -> Tensor:
        """`R`, `(N R, C, s)`, without the columns that say next to nothing beside the prior."""
        blocks = self.hessians.flatten(0, 1)
        if blocks.shape[-1] == 1:
            return blocks.sqrt()
        values, vectors = torch.linalg.eigh(blocks)
        # With D = R R^T and without some columns, Lambda differs by at most this share of itself.
        share = values.clamp_min(0).mT @ self.kernel.diagonal().view(blocks.shape[:2]).sum(1)
        found = share > NEGLIGIBLE
        return vectors[..., found] * values[:, None, found].clamp_min(0).sqrt()

    @cached_property
    def _lower(self) -> Tensor:
        matrix = self._mixed(self._mixed(self.kernel).mT)
        matrix.diagonal().add_(1.0)
        return cholesky(matrix, "the precision of the outputs")

    def explained(self, x: Tensor) -> Tensor:
        """Return `G x`.

        Args:
            x: columns, `(N K, m)`.
        """
        return self._unmixed(torch.cholesky_solve(self._mixed(x), self._lower))

    def draws(self, prior_draws: Tensor) -> Tensor:
        """Turn draws of `N(0, K)` into draws of the conditioned covariance [Matheron's rule].

        `e - K R (I + R^T K R)^-1 (R^T e + z)` with standard normal `z`: no root of `K` is needed.

        Args:
            prior_draws: `e`, as columns `(N K, m)`.
        """
        mixed = self._mixed(prior_draws)
        mixed = mixed + torch.randn_like(mixed)
        return prior_draws - self.kernel @ self._unmixed(torch.cholesky_solve(mixed, self._lower))

    def blocks(self, num_points: int) -> Tensor:
        """Return the covariance of each point's outputs, `(N, K, K)`.

        Args:
            num_points: `N`.
        """
        white = torch.linalg.solve_triangular(self._lower, self._mixed(self.kernel), upper=False)
        white = white.unflatten(1, (num_points, -1))
        prior = self.kernel.unflatten(0, (num_points, -1)).unflatten(2, (num_points, -1))
        return prior.diagonal(dim1=0, dim2=2).movedim(-1, 0) - torch.einsum(
            "mnk,mnl->nkl", white, white
        )

    def _mixed(self, x: Tensor) -> Tensor:
        """Return `R^T x`."""
        return (self.root.mT @ x.reshape(*self.root.shape[:2], x.shape[1])).flatten(0, 1)

    def _unmixed(self, x: Tensor) -> Tensor:
        """Return `R x`."""
        root = self.root
        return (root @ x.reshape(len(root), root.shape[2], x.shape[1])).flatten(0, 1)
