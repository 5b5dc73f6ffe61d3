"""A Gaussian posterior over functions from some of the data [GLM 15, A.7].

The linearised net with prior `w ~ N(m0, P0^-1)` is a Gaussian process about the fitted net with
the kernel `k(x, x') = J P0^-1 J'^T`. On `M` points with output Hessians `L` the covariance is

    `K** - K*M L (I + K_MM L)^-1 K_M* = K** - K*M S (I + S^T K_MM S)^-1 S^T K_M*`,  `L = S S^T`.

The right side is symmetric, and allows a singular `L` such as that of classes. With all points it
is the Laplace approximation's `J (sum J^T L J + P0)^-1 J^T`, for any likelihood. With a part of the
data the prior's precision is multiplied by about `N / M`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe import check
from tyxe.data import Targets
from tyxe.likelihoods import Likelihood, output_hessian_sqrt
from tyxe.predictive.features import Features


class GPPredictive:
    """The covariance of outputs given `M` training points.

    `K** - W^T W` with `W = C^-1 S^T K_M*` and `C C^T = I + S^T K_MM S`; the mean is the fitted
    net's output. `root` is `S` of the points' output Hessians, `(M, K, s)`, and `factor`, about
    `N / M`, multiplies the prior's precision.

    Raises:
        ValueError: the factor is not positive; the kernel matrix does not fit into memory.

    References:
        [GLM] equation 15, appendix A.7.
    """

    def __init__(self, features: Features, root: Tensor, factor: float = 1.0) -> None:
        if not factor > 0:
            raise ValueError(f"factor is {factor}; it multiplies a precision: expected above 0")
        rows = root.shape[0] * root.shape[2]
        check.memory(
            f"the kernel matrix of {root.shape[0]:,} points with {root.shape[2]} columns each",
            rows**2 * 8,
            "use fewer points, or predictive='glm'",
        )
        self.factor = factor
        self._train = features.mixed(root)
        matrix = self._train.kernel(self._train).reshape(rows, rows).div_(factor)
        matrix.diagonal().add_(1.0)
        self._lower = torch.linalg.cholesky(matrix)

    def covariance(self, features: Features) -> Tensor:
        """Return the covariance of each point's outputs, `(n, K, K)` in float64."""
        white = self._explained(features).unflatten(1, (len(features), -1))
        return features.blocks() / self.factor - torch.einsum("qnk,qnl->nkl", white, white)

    def joint_covariance(self, features: Features) -> Tensor:
        """Return the covariance of all outputs of all points, `(n, K, n, K)` in float64."""
        white = self._explained(features)
        prior = features.kernel(features) / self.factor
        return prior - (white.mT @ white).view_as(prior)

    def _explained(self, features: Features) -> Tensor:
        """Return `W`, `(M s, n K)`."""
        cross = self._train.kernel(features).div_(self.factor)
        return torch.linalg.solve_triangular(
            self._lower, cross.reshape(len(self._lower), -1), upper=False
        )


def hessian_root(likelihood: Likelihood, outputs: Tensor, targets: Targets | None = None) -> Tensor:
    """Return a square root of each point's output Hessian, `(n, K, s)`, for `K` outputs.

    Outputs count as often as their targets do.
    """
    columns = list(output_hessian_sqrt(likelihood, outputs))
    root = torch.stack(columns, -1).reshape(len(outputs), -1, len(columns))
    counts = None if targets is None else likelihood.output_counts(targets, outputs)
    return root if counts is None else root * counts.to(root).sqrt().reshape(*root.shape[:2], 1)
