"""The covariance of outputs given data at the same points, also if their precision is singular."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tyxe.linalg.checks import cholesky

# Class Hessians have an eigenvalue of zero, which rounding leaves far below this.
NEGLIGIBLE = 1e-8


@dataclass(frozen=True, eq=False)
class ConditionedKernel:
    """The covariance of outputs given data of precision `D` at the same points, in float64.

    `K - K G K` with `G = R (I + R^T K R)^-1 R^T` and `D = R R^T`. For an invertible `D` that is
    `(K^-1 + D)^-1`, and `G = (K + D^-1)^-1`; `D` may be singular, as it is for classes. `kernel` is
    `K`, `(N K, N K)`, and `hessians` are the blocks of `D`, `(N, R, C, C)`.
    """

    kernel: Tensor
    hessians: Tensor

    @cached_property
    def root(self) -> Tensor:
        """`R`, `(N R, C, s)`, without the columns that are negligible beside the prior."""
        blocks = self.hessians.flatten(0, 1)
        if blocks.shape[-1] == 1:
            return blocks.sqrt()
        values, vectors = torch.linalg.eigh(blocks)
        # Without a column, Lambda changes by at most this share of itself.
        share = values.clamp_min(0).mT @ self.kernel.diagonal().view(blocks.shape[:2]).sum(1)
        found = share > NEGLIGIBLE
        return vectors[..., found] * values[:, None, found].clamp_min(0).sqrt()

    @cached_property
    def _lower(self) -> Tensor:
        matrix = self._mixed(self._mixed(self.kernel).mT)
        matrix.diagonal().add_(1.0)
        return cholesky(matrix, "the precision of the outputs")

    def explained(self, x: Tensor) -> Tensor:
        """Return `G x` for columns `x`, `(N K, m)`."""
        return self._unmixed(torch.cholesky_solve(self._mixed(x), self._lower))

    def draws(self, prior_draws: Tensor) -> Tensor:
        """Return draws of the conditioned covariance from draws `e` of `N(0, K)`, `(N K, m)`.

        Matheron's rule, `e - K R (I + R^T K R)^-1 (R^T e + z)` with standard normal `z`, needs no
        root of `K`.
        """
        mixed = self._mixed(prior_draws)
        mixed = mixed + torch.randn_like(mixed)
        return prior_draws - self.kernel @ self._unmixed(torch.cholesky_solve(mixed, self._lower))

    def blocks(self, num_points: int) -> Tensor:
        """Return the covariance of each of `N` points' outputs, `(N, K, K)`."""
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
