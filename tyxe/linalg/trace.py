"""The trace of a product of one operator with the inverse of another."""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.checks import SMALL
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.inverse import Inverse
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.sum import Sum
from tyxe.linalg.triangular import Cholesky


def trace_of_solve(a: Operator, b: Operator) -> Tensor:
    """Return `tr(A B^-1)`, the expectation of `w^T A w` for `w` of precision `B`.

    No dense matrix is formed where one of the two is diagonal, both are Kronecker products, or `B`
    is the inverse of a covariance of low rank or of a Cholesky factor; blocks and terms are summed.

    Raises:
        NotImplementedError: it needs a dense matrix of more than 4,096 rows.
    """
    if isinstance(a, Sum):
        return torch.stack([trace_of_solve(term, b) for term in a.terms.values()]).sum()
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        pairs = zip(a.blocks.values(), b.blocks.values(), strict=True)
        return torch.stack([trace_of_solve(*pair) for pair in pairs]).sum()
    if isinstance(a, Diagonal):
        return a.entries @ b.inverse_diagonal()
    if isinstance(b, Diagonal):
        return a.diagonal() @ b.inverse_diagonal()
    if isinstance(a, Kronecker) and isinstance(b, Kronecker) and a.shape == b.shape:
        return _kronecker_trace(a, b)
    return _covariance_trace(a, b)


def _kronecker_trace(a: Kronecker, b: Kronecker) -> Tensor:
    """Return the trace in the eigenbases of `B`, where only the diagonal of `A` is needed."""
    out_rotation, in_rotation = b.out_basis.mT @ a.out_basis, b.in_basis.mT @ a.in_basis
    out_diagonal = out_rotation.square() @ a.out_eigenvalues
    in_diagonal = in_rotation.square() @ a.in_eigenvalues
    diagonal = a.scale * torch.outer(out_diagonal, in_diagonal) + a.shift
    return (diagonal * b.inverse_eigenvalues).sum()


def _covariance_trace(a: Operator, b: Operator) -> Tensor:
    """Return `sum_r c_r^T A c_r` over the columns of a root of the covariance."""
    covariance = b.operator if isinstance(b, Inverse) else None
    if isinstance(covariance, LowRank):
        return a.diagonal() @ covariance.entries + a.quadratic(covariance.factor.mT).sum()
    if isinstance(covariance, Cholesky):
        return a.quadratic(covariance.lower.mT).sum()
    if b.size > SMALL:
        raise NotImplementedError(
            f"the trace of a {type(a).__name__} by a {type(b).__name__} of {b.size:,} rows takes a "
            "dense matrix"
        )
    identity = torch.eye(b.size, dtype=b.dtype, device=b.device)
    return a.quadratic(b.inverse_sqrt(identity)).sum()
