r"""A Gaussian posterior over functions from some of the data [GLM 15, A.7].

The linearised net with prior `w ~ N(m0, P0^-1)` is a Gaussian process about the fitted net with
the kernel `k(x, x') = J P0^-1 J'^T`. On `M` points with output Hessians `L` the covariance is

    `K** - K*M L (I + K_MM L)^-1 K_M* = K** - K*M S (I + S^T K_MM S)^-1 S^T K_M*`,  `L = S S^T`,

of which the right side is symmetric, and takes a singular `L` such as that of classes. With all
points it is the Laplace approximation's `J (sum J^T L J + P0)^-1 J^T`, for any likelihood. On part
of the data the prior's precision is multiplied by about `N / M`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe.curvature import check_memory
from tyxe.likelihoods import Likelihood, output_hessian_sqrt
from tyxe.linalg import dense_bytes
from tyxe.predictive.features import Features

__all__ = ["GPPredictive", "hessian_root"]


class GPPredictive:
    r"""The covariance of outputs given `M` training points.

    `K** - W^T W` with `W = C^-1 S^T K_M*` and `C C^T = I + S^T K_MM S`; the mean is the fitted net.

    Args:
        features: of the training points.
        root: `S` of their output Hessians, `(M, K, s)`; see `hessian_root`.
        factor: multiplies the prior's precision: about `N / M`.

    Raises:
        ValueError: the factor is not positive; the kernel matrix does not fit into memory.

    References:
        [GLM] equation 15, appendix A.7.

    Example:
        A straight line through the origin, `f = w x`, with `w ~ N(0, 1)` and unit noise; given
        two points at `x = 1`, the precision of `w` is 3:

        >>> features = Features.from_jacobian(torch.ones(2, 1, 1), torch.ones(1))
        >>> gp = GPPredictive(features, root=torch.ones(2, 1, 1))
        >>> test = Features.from_jacobian(torch.tensor([[[3.0]]]), torch.ones(1))
        >>> gp.covariance(test).item()  # 9 / 3
        3.0
    """

    def __init__(self, features: Features, root: Tensor, factor: float = 1.0) -> None:
        if not factor > 0:
            raise ValueError(f"factor is {factor}; it multiplies a precision: expected above 0")
        rows = root.shape[0] * root.shape[2]
        check_memory(
            f"the kernel matrix of {root.shape[0]:,} points with {root.shape[2]} columns each",
            dense_bytes(rows, torch.float64),
            "use fewer points, or predictive='glm'",
        )
        self.factor = factor
        self._train = features.mixed(root)
        matrix = self._train.kernel(self._train).reshape(rows, rows).div_(factor)
        matrix.diagonal().add_(1.0)
        self._lower = torch.linalg.cholesky(matrix)

    def covariance(self, features: Features) -> Tensor:
        """Return the covariance of each point's outputs, `(n, K, K)` in float64.

        Args:
            features: of the points.
        """
        white = self._explained(features).unflatten(1, (len(features), -1))
        return features.blocks() / self.factor - torch.einsum("qnk,qnl->nkl", white, white)

    def joint_covariance(self, features: Features) -> Tensor:
        """Return the covariance of all outputs of all points, `(n, K, n, K)` in float64.

        Args:
            features: of the points.
        """
        white = self._explained(features)
        prior = features.kernel(features) / self.factor
        return prior - (white.mT @ white).view_as(prior)

    def _explained(self, features: Features) -> Tensor:
        """What the data explain: `W`, `(M s, n K)`."""
        cross = self._train.kernel(features).div_(self.factor)
        return torch.linalg.solve_triangular(
            self._lower, cross.reshape(len(self._lower), -1), upper=False
        )


def hessian_root(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return a square root of each point's output Hessian, `(n, K, s)`.

    Args:
        likelihood: has a registered output Hessian.
        outputs: the net's, `(n, ...)` of `K` elements a point.

    Example:
        >>> import tyxe
        >>> hessian_root(tyxe.likelihoods.Categorical(9), torch.zeros(5, 3)).shape
        torch.Size([5, 3, 2])
    """
    columns = list(output_hessian_sqrt(likelihood, outputs))
    return torch.stack(columns, -1).reshape(len(outputs), -1, len(columns))
