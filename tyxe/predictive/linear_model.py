"""The linearised net over a data set, a generalised linear model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe.likelihoods import Likelihood, output_hessian
from tyxe.likelihoods.output_hessian import true_gradient
from tyxe.linalg import Dense, Diagonal, Operator

STRUCTURES: dict[str, Callable[[Tensor], Operator]] = {"full": Dense, "diag": Diagonal}

# Numbers that a product with Jacobians has at a time, to limit memory.
CHUNK = 2**24
# The same where each number is used once: few enough for the processor's cache.
CACHED = 2**17


@dataclass(frozen=True, eq=False)
class LinearModel:
    """`f_lin(x_n, w) = f_n + J_n (w - w0)` on all data, a likelihood, and `w ~ N(m0, P0^-1)`.

    Attributes:
        jacobian: `J`, of all `K` outputs of each point, `(N, K, P)`.
        outputs: `f`, `(N, ...)`.
        loc: `w0`, `(P,)`.
        prior_mean: `m0`, `(P,)`.
        prior_precision: the diagonal of `P0`, `(P,)`.
        likelihood: one with a registered output Hessian.
        targets: `(N, ...)`.
        weight: of the log-likelihood; above 1 where the data are a part of all.
    """

    jacobian: Tensor
    outputs: Tensor
    loc: Tensor
    prior_mean: Tensor
    prior_precision: Tensor
    likelihood: Likelihood
    targets: Tensor
    weight: float = 1.0

    def predict(self, w: Tensor) -> Tensor:
        """Return `f_lin(x_n, w)`, `(N, ...)`, for weights `(P,)`."""
        return self.outputs + (self.jacobian @ (w - self.loc)).view_as(self.outputs)

    def log_joint(self, w: Tensor) -> Tensor:
        """Return `sum_n log p(y_n | f_lin(x_n, w)) + log p(w)` in nats, up to a constant."""
        fit = self.likelihood.log_likelihood(self.predict(w), self.targets, "sum")
        return self.weight * fit - (self.prior_precision * (w - self.prior_mean).square()).sum() / 2

    def gradient(self, w: Tensor, residuals: Tensor) -> Tensor:
        """Return `sum_n J_n^T r_n - P0 (w - m0)`, `(P,)`, with the residuals `r` of `local`."""
        fit = residuals.reshape(-1) @ self.jacobian.flatten(0, 1)
        return self.weight * fit - self.prior_precision * (w - self.prior_mean)

    def local(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return `r_n = d log p(y_n|f_n) / df_n`, `(N, K)`, and `H_n`, blocks `(N, R, C, C)`."""
        residuals = true_gradient(self.likelihood, outputs, self.targets)
        return residuals.reshape(len(outputs), -1), output_hessian(self.likelihood, outputs)

    def curvature_matmul(self, blocks: Tensor, w: Tensor) -> Tensor:
        """Return `(sum_n J_n^T H_n J_n + P0) w` for blocks `H`, `(N, R, C, C)`, as products."""
        products = (self.jacobian @ w).reshape(blocks.shape[:-1]).unsqueeze(-1)
        fit = (blocks @ products).reshape(-1) @ self.jacobian.flatten(0, 1)
        return self.weight * fit + self.prior_precision * w

    def curvature(self, blocks: Tensor, structure: str) -> Tensor:
        """Return `sum_n J_n^T H_n J_n + P0` for structure "full", or its diagonal for "diag"."""
        return self._matrix(blocks) if structure == "full" else self._diagonal(blocks)

    def _matrix(self, blocks: Tensor) -> Tensor:
        total = self.prior_precision.diag()
        rows = self._rows(CHUNK)
        for j, h in zip(self.jacobian.split(rows), blocks.split(rows), strict=True):
            total.addmm_(j.flatten(0, 1).mT, _product(h, j).flatten(0, 1), alpha=self.weight)
        return (total + total.mT) / 2

    def _diagonal(self, blocks: Tensor) -> Tensor:
        total = torch.zeros_like(self.prior_precision)
        rows = self._rows(CACHED)
        for j, h in zip(self.jacobian.split(rows), blocks.split(rows), strict=True):
            total += _product(h, j).mul_(j).sum((0, 1))
        return self.prior_precision + self.weight * total

    def output_covariance(self, precision: Operator) -> Tensor:
        """Return `J_n Lambda^-1 J_n^T` of each point, `(N, K, K)`, for a precision `Lambda`."""
        pieces = self.jacobian.split(self._rows(CHUNK))
        return torch.cat([precision.inverse_quadratic(j) for j in pieces])

    def _rows(self, numbers: int) -> int:
        return max(1, numbers // self.jacobian[0].numel())


def _product(blocks: Tensor, jacobian: Tensor) -> Tensor:
    """Return `H_n J_n`, `(n, K, P)`."""
    return (blocks @ jacobian.unflatten(1, blocks.shape[1:3])).view_as(jacobian)
