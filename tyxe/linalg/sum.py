"""A sum of operators that no structure holds, and the sums that some do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.checks import check_same_kind
from tyxe.linalg.cost import SMALL, check_small, factorization
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank

__all__ = ["Sum", "average", "invertible", "is_diagonal", "plus"]

SumT = TypeVar("SumT", bound="Sum")


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Operator):
    """`A = A_1 + A_2 + ...`, each as it is: one Kronecker product for each task [T 3.59].

    Products, quadratic forms and the diagonal cost what those of the terms cost, and nothing
    `P x P` is formed. A sum of Kronecker products has no root: what needs an inverse is taken from
    the dense matrix, once, up to some thousands of rows.

    Args:
        terms: operators of one size by name, not none.

    Raises:
        ValueError: there is no term, or two differ in size, type or device; where an inverse is
            asked for, the sum is too large.

    Reference:
        [T] eq. 3.59, 3.63.

    Example:
        >>> terms = [Kronecker.from_factors(torch.eye(2), c * torch.eye(3)) for c in (1.0, 2.0)]
        >>> total = Sum({"first": terms[0], "second": terms[1]})
        >>> total.quadratic(torch.ones(6)), total.inverse_diagonal()[0]
        (tensor(18.), tensor(0.3333))
    """

    terms: Mapping[str, Operator]

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", dict(self.terms))
        if not self.terms:
            raise ValueError("a sum of operators has at least one term")
        first = next(iter(self.terms))
        for name, term in self.terms.items():
            check_same_kind(self.terms[first], term, f"the terms {first!r} and {name!r}")
            if term.size != self.terms[first].size:
                raise ValueError(
                    f"the terms {first!r} and {name!r} have {self.terms[first].size} and "
                    f"{term.size} rows; a sum has terms of one size"
                )

    @property
    def size(self) -> int:
        return next(iter(self.terms.values())).size

    @factorization
    def _diagonal(self) -> Tensor:
        return torch.stack([term.diagonal() for term in self.terms.values()]).sum(0)

    @factorization
    def _dense(self) -> Dense:
        check_small(
            f"the inverse of a sum of {len(self.terms)} operators",
            self.size,
            'keep the average of the factors, which has an inverse (accumulate="average"), or '
            "predict at the mode, with num_predictions=0",
        )
        return Dense(self.to_dense())

    def _matmul(self, x: Tensor) -> Tensor:
        first, *others = (term.matmul(x) for term in self.terms.values())
        for other in others:
            first = first + other
        return first

    def _quadratic(self, x: Tensor) -> Tensor:
        return torch.stack([term.quadratic(x) for term in self.terms.values()]).sum(0)

    def diagonal(self) -> Tensor:
        return self._diagonal

    def to_dense(self) -> Tensor:
        return torch.stack([term.to_dense() for term in self.terms.values()]).sum(0)

    def logdet(self) -> Tensor:
        return self._dense.logdet()

    def inverse_diagonal(self) -> Tensor:
        return self._dense.inverse_diagonal()

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return self._dense.inverse_sqrt(z)

    def _whiten(self, x: Tensor) -> Tensor:
        return self._dense.whiten(x)

    def _scaled(self: SumT, c: Tensor) -> SumT:
        return self._like(terms={name: term.scaled(c) for name, term in self.terms.items()})

    def _add_diagonal(self: SumT, d: Tensor) -> SumT:
        return self._like(terms=_with_term(self.terms, Diagonal(d.expand(self.size))))


def _with_term(terms: Mapping[str, Operator], new: Operator) -> dict[str, Operator]:
    """Terms with one more, or with a diagonal added to the one that is there."""
    if isinstance(new, Diagonal):
        for name, term in terms.items():
            if isinstance(term, Diagonal):
                return {**terms, name: term.add_diagonal(new.entries)}
    return {**terms, str(len(terms)): new}


def invertible(operator: Operator) -> bool:
    """Say whether an operator offers what needs an inverse, at its size.

    Example:
        >>> large = Kronecker.from_factors(torch.eye(100), torch.eye(100))
        >>> invertible(large), invertible(Sum({"0": large, "1": large}))
        (True, False)
    """
    if isinstance(operator, BlockDiagonal):
        return all(map(invertible, operator.blocks.values()))
    return not isinstance(operator, Sum) or operator.size <= SMALL


def is_diagonal(operator: Operator) -> bool:
    """Say whether an operator couples nothing.

    Example:
        >>> is_diagonal(BlockDiagonal({"a": Diagonal(torch.ones(2))}))
        True
    """
    if isinstance(operator, BlockDiagonal):
        return all(map(is_diagonal, operator.blocks.values()))
    return isinstance(operator, Diagonal)


# What takes any diagonal and stays what it is.
_TAKES_DIAGONAL = (Diagonal, Dense, LowRank, Sum)


def plus(a: Operator, b: Operator) -> Operator:
    """Return `A + B`: block by block, by the structure that holds both, else as a `Sum`.

    Args:
        a: an operator.
        b: another of its size.

    Raises:
        ValueError: they differ in size, type or device.

    Example:
        >>> plus(Diagonal(torch.ones(2)), Diagonal(torch.ones(2))).diagonal()
        tensor([2., 2.])
    """
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        pairs = zip(a.blocks.items(), b.blocks.values(), strict=True)
        return BlockDiagonal({name: plus(block, other) for (name, block), other in pairs})
    for one, other in ((a, b), (b, a)):
        if isinstance(one, BlockDiagonal) and len(one.blocks) == 1:
            ((name, block),) = one.blocks.items()
            return BlockDiagonal({name: plus(block, other)})
        if isinstance(one, Diagonal) and isinstance(other, _TAKES_DIAGONAL):
            return other.add_diagonal(one.entries)
        if isinstance(one, Dense):
            check_same_kind(one, other, "the terms")
            return Dense(one.matrix + other.to_dense())
    if isinstance(a, Sum):
        terms = a.terms
        for term in b.terms.values() if isinstance(b, Sum) else [b]:
            terms = _with_term(terms, term)
        return Sum(terms)
    return plus(b, a) if isinstance(b, Sum) else Sum({"0": a, "1": b})


def average(a: Operator, b: Operator) -> Operator:
    """Return what stands for `A + B` with one Kronecker product in the place of two [T 3.60].

    The sum of products becomes the product of the factors' averages; what is no product is added
    as by `plus`.

    Args:
        a: an operator.
        b: another, of the same blocks.

    Example:
        >>> first = Kronecker.from_factors(torch.eye(2), torch.eye(3), scale=10.0)
        >>> average(first, first.scaled(3.0)).diagonal()[0]
        tensor(40.)
    """
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        pairs = zip(a.blocks.items(), b.blocks.values(), strict=True)
        return BlockDiagonal({name: average(block, other) for (name, block), other in pairs})
    if isinstance(a, Kronecker) and isinstance(b, Kronecker) and a.shape == b.shape:
        return a.averaged(b)
    return plus(a, b)
