"""Operators over the same elements in another order."""

from __future__ import annotations

import functools

from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.checks import check_small
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.triangular import Cholesky


@functools.singledispatch
def permuted(operator: Operator, order: Tensor) -> Operator:
    """Return `A[order][:, order]` for a permutation `order`, `(P,)`, of the rows.

    Register a structure that keeps its form. All others become dense matrices, of at most 4,096
    rows; larger ones raise a ValueError.
    """
    check_small(f"another order of a {type(operator).__name__}", operator.size, "keep its order")
    return Dense(operator.to_dense()[order][:, order])


@permuted.register
def _(operator: Diagonal, order: Tensor) -> Operator:
    return Diagonal(operator.entries[order])


@permuted.register
def _(operator: LowRank, order: Tensor) -> Operator:
    return LowRank(operator.entries[order], operator.factor[order])


@permuted.register
def _(operator: Cholesky, order: Tensor) -> Operator:
    return LowRank(operator.lower.new_zeros(operator.size), operator.lower[order])
