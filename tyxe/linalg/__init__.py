"""Symmetric positive semi-definite operators: what curvature is made of. Plain PyTorch.

One protocol, `Operator`: products, solves, log-determinants, marginal variances, quadratic forms,
draws, and what a prior adds. `Dense`, `Cholesky`, `Diagonal`, `LowRank` and `Kronecker` implement
it, `BlockDiagonal` puts them side by side, `Sum` one upon the other, and `Inverse` turns one round.
"""

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.checks import NotPositiveDefiniteError
from tyxe.linalg.cost import SMALL, dense_bytes
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.inverse import Inverse, root
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.state import STRUCTURES, operator_from_state, operator_state
from tyxe.linalg.sum import Sum, average, invertible, is_diagonal, plus
from tyxe.linalg.trace import trace_of_solve
from tyxe.linalg.triangular import Cholesky

__all__ = [
    "SMALL",
    "STRUCTURES",
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
    "average",
    "dense_bytes",
    "invertible",
    "is_diagonal",
    "operator_from_state",
    "operator_state",
    "plus",
    "root",
    "trace_of_solve",
]
