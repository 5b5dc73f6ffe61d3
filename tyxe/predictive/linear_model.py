"""The linearised net over a data set, a generalised linear model, and its mode [GLM 3.3].

With `f_lin(x, w) = f(x, w0) + J(x) (w - w0)` the log joint is concave for the usual likelihoods,
and the Gaussian of the curvature at `w0` is only a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe import check
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.output_hessian import hessian_blocks, true_gradient
from tyxe.linalg import Dense, Diagonal, Operator

# A mean, `(P,)`, and a precision.
Posterior = tuple[Tensor, Operator]

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
        weight: weight of the log-likelihood; above 1 if the data are a part of all.
    """

    jacobian: Tensor
    outputs: Tensor
    loc: Tensor
    prior_mean: Tensor
    prior_precision: Tensor
    likelihood: Likelihood
    targets: Tensor
    weight: float = 1.0

    @check.arguments
    def predict(self, w: Tensor) -> Tensor:
        """Return `f_lin(x_n, w)`, `(N, ...)`, for weights `(P,)`."""
        check.shape("w", w, self.loc.shape)
        return self.outputs + (self.jacobian @ (w - self.loc)).view_as(self.outputs)

    def log_joint(self, w: Tensor) -> Tensor:
        """Return `sum_n log p(y_n | f_lin(x_n, w)) + log p(w)` in nats, up to a constant."""
        fit = self.likelihood.log_likelihood(self.predict(w), self.targets, "sum")
        return self.weight * fit - (self.prior_precision * (w - self.prior_mean).square()).sum() / 2

    @check.arguments
    def gradient(self, w: Tensor, residuals: Tensor) -> Tensor:
        """Return `sum_n J_n^T r_n - P0 (w - m0)`, `(P,)`, with the residuals `r` of `local`."""
        check.shape("residuals", residuals, self.jacobian.shape[:2])
        fit = residuals.reshape(-1) @ self.jacobian.flatten(0, 1)
        return self.weight * fit - self.prior_precision * (w - self.prior_mean)

    @check.arguments
    def local(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return `r_n = d log p(y_n|f_n) / df_n`, `(N, K)`, and `H_n`, blocks `(N, R, C, C)`."""
        residuals = true_gradient(self.likelihood, outputs, self.targets)
        return residuals.reshape(len(outputs), -1), hessian_blocks(self.likelihood, outputs)

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


# --------------------------------------------------------------------------- its mode


@torch.no_grad()
def refine_laplace(
    model: LinearModel, structure: str = "full", *, num_steps: int = 100, tolerance: float = 1e-8
) -> Posterior:
    r"""Return the Laplace approximation of the linearised model.

    The mode `w*` of `sum_n log p(y_n | f_lin(x_n, w)) + log p(w)` by Newton's method, with steps
    from conjugate gradients; then `sum_n J_n^T H_n J_n + P0` with `H_n` at `f_lin(x_n, w*)`.

    Args:
        model: the linearised model.
        structure: of the precision, `"full"` or `"diag"`; the mode is the same.
        num_steps: largest number of Newton's steps.
        tolerance: stop if a step would gain less than half of this, in nats, or less than the log
            joint's rounding.

    Returns:
        `w*`, `(P,)`, and the precision.

    Raises:
        ValueError: an unknown structure.

    References:
        [GLM] section 3.3.

    Example:
        >>> import tyxe
        >>> x = torch.tensor([[-1.0], [1.0], [2.0]])
        >>> model = LinearModel(
        ...     x[:, None], torch.zeros(3, 1), torch.zeros(1), torch.zeros(1), torch.ones(1),
        ...     tyxe.likelihoods.Bernoulli(3), torch.tensor([[0.0], [1.0], [1.0]]))
        >>> mode, precision = refine_laplace(model)
        >>> residuals, _ = model.local(model.predict(mode))
        >>> bool(model.gradient(mode, residuals).abs() < 1e-4)
        True
    """
    check.choice("structure", structure, STRUCTURES)
    w = model.loc
    for _ in range(num_steps):
        residuals, blocks = model.local(model.predict(w))
        gradient = model.gradient(w, residuals)
        step = _newton_step(model, blocks, gradient)
        moved = _along(model, w, step, float(step @ gradient))
        if moved is None:
            break
        w = moved
        if float(step @ gradient) < max(tolerance, _rounding(model, w)):
            break
    else:
        warn(f"refine: Newton's method has not converged in num_steps={num_steps}")
    _, blocks = model.local(model.predict(w))
    return w, STRUCTURES[structure](model.curvature(blocks, structure))


def _newton_step(model: LinearModel, blocks: Tensor, gradient: Tensor) -> Tensor:
    """Solve `(G + P0) d = gradient` by conjugate gradients, more exactly closer to the mode."""
    inverse = model.curvature(blocks, "diag").reciprocal()
    decrement = float(gradient @ (inverse * gradient))
    tolerance = max(min(0.1, decrement**0.5), 10 * torch.finfo(gradient.dtype).eps)
    step, residual = torch.zeros_like(gradient), gradient
    direction = inverse * residual
    left = decrement
    # In exact arithmetic P iterations are enough; rounding takes some more.
    for _ in range(2 * len(gradient)):
        if left <= tolerance**2 * decrement:
            break
        product = model.curvature_matmul(blocks, direction)
        length = left / float(direction @ product)
        step, residual = step + length * direction, residual - length * product
        before, left = left, float(residual @ (inverse * residual))
        direction = inverse * residual + left / before * direction
    return step


def _along(model: LinearModel, w: Tensor, step: Tensor, slope: float) -> Tensor | None:
    """Return `w` after the longest of the halved steps for which the log joint rises, or None."""
    before, rounding = float(model.log_joint(w)), 8 * _rounding(model, w)
    length = 1.0
    while length > 1e-6:
        moved = w + length * step
        if float(model.log_joint(moved)) >= before + 1e-4 * length * slope - rounding:
            return moved
        length /= 2
    return None


def _rounding(model: LinearModel, w: Tensor) -> float:
    """Return the rounding error of the log joint, in nats."""
    return torch.finfo(w.dtype).eps * abs(float(model.log_joint(w)))
