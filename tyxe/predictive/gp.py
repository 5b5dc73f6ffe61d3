"""A Gaussian posterior over functions from some of the data [GLM 15, A.7].

The linearised net with prior `w ~ N(m0, P0^-1)` is a Gaussian process about the fitted net with
the kernel `k(x, x') = J P0^-1 J'^T`. On `M` points with output Hessians `L` the covariance is

    `K** - K*M L (I + K_MM L)^-1 K_M* = K** - K*M S (I + S^T K_MM S)^-1 S^T K_M*`,  `L = S S^T`.

The right side is symmetric, and allows a singular `L` such as that of classes. With all points it
is the Laplace approximation's `J (sum J^T L J + P0)^-1 J^T`, for any likelihood. With a part of the
data the prior's precision is multiplied by about `N / M`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature import Linearization
from tyxe.curvature.gradients import OuterProductGradients, PointGradients, dense_gradients
from tyxe.curvature.output_covariance import one_hot
from tyxe.data import Targets
from tyxe.likelihoods import Likelihood, output_hessian_sqrt
from tyxe.linalg.checks import cholesky

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
