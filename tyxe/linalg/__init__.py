"""Symmetric positive semi-definite operators: what curvature is made of. Plain PyTorch.

One protocol, `Operator`: products, solves, log-determinants, marginal variances, quadratic forms,
draws, and what a prior adds. `Dense`, `Diagonal`, `LowRank` and `Kronecker` implement it, and
`BlockDiagonal` puts them side by side.
"""

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.cost import dense_bytes
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.state import STRUCTURES, operator_from_state, operator_state

__all__ = [
    "STRUCTURES",
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Kronecker",
    "LowRank",
    "Operator",
    "dense_bytes",
    "operator_from_state",
    "operator_state",
]
