"""Symmetric positive semi-definite operators, such as curvatures, in plain PyTorch.

One protocol, `Operator`: products, solves, log-determinants, marginal variances, quadratic forms,
draws, scales and added diagonals. `Dense`, `Cholesky`, `Diagonal`, `LowRank` and `Kronecker`
implement it for one structure, `BlockDiagonal`, `Sum` and `Inverse` for combinations.
"""

import tyxe.linalg.functions  # noqa: F401  (registers the form of operators in states)
from tyxe.linalg.base import Operator
from tyxe.linalg.checks import NotPositiveDefiniteError
from tyxe.linalg.composite import BlockDiagonal, Inverse, Sum
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.matrices import Cholesky, Dense, Diagonal, LowRank

__all__ = [
    "BlockDiagonal",
    "Cholesky",
    "Dense",
    "Diagonal",
    "Inverse",
    "Kronecker",
    "LowRank",
    "NotPositiveDefiniteError",
    "Operator",
    "Sum",
]
