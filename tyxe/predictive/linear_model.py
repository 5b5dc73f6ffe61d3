"""The linearised net over a data set as a model of its own: its mode, and its Gaussian process.

With `f_lin(x, w) = f(x, w0) + J(x) (w - w0)` the log joint is concave for the usual likelihoods,
and the Gaussian of the curvature at `w0` is only a start [GLM 3.3].

With prior `w ~ N(m0, P0^-1)` it is a Gaussian process about the fitted net [GLM 15, A.7] with the
kernel `k(x, x') = J P0^-1 J'^T`. On `M` points with output Hessians `L` the covariance is

    `K** - K*M L (I + K_MM L)^-1 K_M* = K** - K*M S (I + S^T K_MM S)^-1 S^T K_M*`,  `L = S S^T`.

The right side is symmetric, and allows a singular `L` such as that of classes. With all points it
is the Laplace approximation's `J (sum J^T L J + P0)^-1 J^T`, for any likelihood. With a part of the
data the prior's precision is multiplied by about `N / M`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature import Linearization
from tyxe.curvature.gradients import OuterProductGradients, PointGradients, dense_gradients
from tyxe.curvature.output_covariance import one_hot
from tyxe.data import Targets
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood, output_hessian_sqrt
from tyxe.likelihoods.output_hessian import hessian_blocks, true_gradient
from tyxe.linalg import Dense, Diagonal, Operator
from tyxe.linalg.checks import cholesky

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


# --------------------------------------------------------------------------- the kernel


@dataclass(frozen=True, eq=False)
class Part:
    """The features of one block of weights: `g`, `(n, K, p)`, or outer products `g_nk a_n^T`.

    The products have `g`, `(n, K, o)`, of a linear map's outputs and `a`, `(n, i)`, of its inputs.
    """

    g: Tensor
    a: Tensor | None = None

    def kernel(self, other: Part) -> Tensor:
        """Return the inner products `(n, K, m, L)` with the same block's features at other points.

        They are summed in float64, because the predictive is a small difference of them.
        """
        products = torch.einsum("nkp,mlp->nkml", self.g.double(), other.g.double())
        if self.a is None or other.a is None:
            return products
        return products.mul_((self.a.double() @ other.a.double().mT)[:, None, :, None])

    def blocks(self) -> Tensor:
        """Return the inner products within each point, `(n, K, K)`."""
        g = self.g.double()
        if self.a is None:
            return g @ g.mT
        return (g @ g.mT) * self.a.double().square().sum(-1)[:, None, None]


@dataclass(frozen=True, eq=False)
class Features:
    """Gradients of outputs times the prior's standard deviations, `J P0^-1/2`, `(n, K, P)`."""

    parts: tuple[Part, ...]

    @classmethod
    def cat(cls, pieces: Sequence[Features]) -> Features:
        """Return the features of all points of some batches."""
        found = []
        for parts in zip(*(piece.parts for piece in pieces), strict=True):
            inputs = [part.a for part in parts if part.a is not None]
            a = torch.cat(inputs) if inputs else None
            found.append(Part(torch.cat([part.g for part in parts]), a))
        return cls(tuple(found))

    def __len__(self) -> int:
        return len(self.parts[0].g)

    def mixed(self, root: Tensor) -> Features:
        """Return `S^T J P0^-1/2`, `(n, s, P)`, for a root `S` of each point, `(n, K, s)`."""
        with full_precision(root):
            return Features(tuple(Part(root.to(p.g).mT @ p.g, p.a) for p in self.parts))

    def kernel(self, other: Features) -> Tensor:
        """Return `J P0^-1 J'^T` of all pairs of outputs, `(n K, m K')` in float64."""
        total = self.parts[0].kernel(other.parts[0])
        for mine, theirs in zip(self.parts[1:], other.parts[1:], strict=True):
            total += mine.kernel(theirs)
        return total.flatten(2).flatten(0, 1)

    def blocks(self) -> Tensor:
        """Return `J P0^-1 J^T` of every point with itself, `(n, K, K)` in float64."""
        return torch.stack([part.blocks() for part in self.parts]).sum(0)


def output_features(linear: Linearization, prior_precision: Tensor) -> Features:
    """Return the features of a linearised net; those of linear maps stay outer products.

    `prior_precision` is the diagonal of `P0`, `(P,)`, in the order of the net's blocks.
    """
    indices = range(linear.outputs.shape[1:].numel())
    with full_precision(linear.outputs):
        rows = [*linear.gradients_of(one_hot(linear.outputs, indices))]
    sds = prior_precision.rsqrt().split(linear.blocks.sizes)
    parts = zip(linear.blocks.names, sds, strict=True)
    return Features(tuple(_part([row[name] for row in rows], sd) for name, sd in parts))


def _part(rows: list[PointGradients], sd: Tensor) -> Part:
    products = [row for row in rows if isinstance(row, OuterProductGradients)]
    if products and products[0].is_single:
        a = products[0].a[:, 0, 0]
        by_input = sd.view(-1, a.shape[-1])
        if bool((by_input == by_input[0]).all()):
            return Part(torch.stack([row.g[:, 0, 0] for row in products], 1), a * by_input[0])
    return Part(dense_gradients(rows) * sd)


# --------------------------------------------------------------------------- given data


class Conditioned:
    """What data of precision `L = S S^T` say of Gaussian outputs, also where `L` is singular.

    It holds the factor `C C^T = I + S^T K S`; `kernel` is `S^T K S`, which is changed.
    """

    def __init__(self, kernel: Tensor) -> None:
        kernel.diagonal().add_(1.0)
        self._lower = cholesky(kernel, "the precision of the outputs")

    def solve(self, x: Tensor) -> Tensor:
        """Return `(I + S^T K S)^-1 x` for columns `x`."""
        return torch.cholesky_solve(x, self._lower)

    def explained(self, cross: Tensor, num_points: int) -> Tensor:
        """Return the part of each of `n` points' covariance that the data take away, `(n, K, K)`.

        It is the diagonal of `K*M S (I + S^T K S)^-1 S^T K_M*`, for `cross`, `S^T K_M*`.
        """
        white = torch.linalg.solve_triangular(self._lower, cross, upper=False)
        white = white.unflatten(1, (num_points, -1))
        return torch.einsum("qnk,qnl->nkl", white, white)


class GPPredictive:
    """The covariance of outputs given `M` training points; the mean is the fitted net's output.

    `root` is `S` of the points' output Hessians, `(M, K, s)`, and `factor`, about `N / M`,
    multiplies the prior's precision.
    """

    def __init__(self, features: Features, root: Tensor, factor: float = 1.0) -> None:
        check.memory(
            f"the kernel matrix of {root.shape[0]:,} points with {root.shape[2]} columns each",
            (root.shape[0] * root.shape[2]) ** 2 * 8,
            "use fewer points, or predictive='glm'",
        )
        self.factor, self._train = factor, features.mixed(root)
        self._given = Conditioned(self._train.kernel(self._train).div_(factor))

    def covariance(self, features: Features) -> Tensor:
        """Return the covariance of each point's outputs, `(n, K, K)` in float64."""
        cross = self._train.kernel(features).div_(self.factor)
        return features.blocks() / self.factor - self._given.explained(cross, len(features))


def hessian_root(likelihood: Likelihood, outputs: Tensor, targets: Targets | None = None) -> Tensor:
    """Return a square root of each point's output Hessian, `(n, K, s)`, for `K` outputs.

    Outputs count as often as their targets do.
    """
    columns = list(output_hessian_sqrt(likelihood, outputs))
    root = torch.stack(columns, -1).reshape(len(outputs), -1, len(columns))
    counts = None if targets is None else likelihood.hessian_counts(targets, outputs)
    return root if counts is None else root * counts.to(root).sqrt().reshape(*root.shape[:2], 1)
