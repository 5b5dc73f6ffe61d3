"""Symmetric positive semi-definite operators, such as curvatures, in plain PyTorch.

One protocol, `Operator`: products, solves, log-determinants, marginal variances, quadratic forms,
draws, scales and added diagonals. `Dense`, `Cholesky`, `Diagonal`, `LowRank` and `Kronecker`
implement it for one structure, `BlockDiagonal`, `Sum` and `Inverse` for combinations.
"""

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.checks import NotPositiveDefiniteError
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.inverse import Inverse
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.sum import Sum
from tyxe.linalg.triangular import Cholesky

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
