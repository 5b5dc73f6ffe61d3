"""Sums of operators: of the structure of the terms where they allow it, else a `Sum`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import SMALL, check_same_kind, check_small
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.kronecker import Kronecker, is_one_number
from tyxe.linalg.low_rank import LowRank

SumT = TypeVar("SumT", bound="Sum")


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Operator):
    """`A = A_1 + A_2 + ...`, as separate terms: one Kronecker product for each task [T 3.59].

    Products, quadratic forms and the diagonal are sums of those of the terms, without a `P x P`
    matrix. A sum of Kronecker products has no root of its own: methods that need an inverse
    factorise the dense matrix, once and up to 4,096 rows.

    Args:
        terms: at least one operator, by name, all of one size.

    Raises:
        ValueError: there is no term, or two differ in size, type or device; from methods that
            need an inverse, the sum is too large.

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
    """Return terms with one more; a diagonal is added to a diagonal term if there is one."""
    if isinstance(new, Diagonal):
        for name, term in terms.items():
            if isinstance(term, Diagonal):
                return {**terms, name: term.add_diagonal(new.entries)}
    return {**terms, str(len(terms)): new}


def invertible(operator: Operator) -> bool:
    """Whether the methods of an operator that need an inverse work at its size."""
    if isinstance(operator, BlockDiagonal):
        return all(map(invertible, operator.blocks.values()))
    return not isinstance(operator, Sum) or operator.size <= SMALL


def is_diagonal(operator: Operator) -> bool:
    """Whether an operator is diagonal by its structure."""
    if isinstance(operator, BlockDiagonal):
        return all(map(is_diagonal, operator.blocks.values()))
    return isinstance(operator, Diagonal)


# Structures to which any diagonal can be added.
_TAKES_DIAGONAL = (Diagonal, Dense, LowRank, Sum)


def _plus_diagonal(operator: Operator, entries: Tensor) -> Operator | None:
    """Return an operator of the same structure with a diagonal added, or None if there is none."""
    if isinstance(operator, BlockDiagonal):
        parts = operator.split(entries)
        pairs = ((name, block, parts[name]) for name, block in operator.blocks.items())
        return BlockDiagonal({name: plus(block, Diagonal(part)) for name, block, part in pairs})
    if isinstance(operator, _TAKES_DIAGONAL):
        return operator.add_diagonal(entries)
    if isinstance(operator, Kronecker) and is_one_number(entries):
        # With gradients, each element of the diagonal has its share.
        return operator.add_diagonal(entries if entries.requires_grad else entries[0])
    return None


def plus(a: Operator, b: Operator) -> Operator:
    """Return `A + B`: block by block, in the structure of one of them if possible, else as a `Sum`.

    A Kronecker product can add a diagonal of one number; with any other the result is a `Sum`.
    Operators that differ in size, type or device are a ValueError.
    """
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        pairs = zip(a.blocks.items(), b.blocks.values(), strict=True)
        return BlockDiagonal({name: plus(block, other) for (name, block), other in pairs})
    for one, other in ((a, b), (b, a)):
        if is_diagonal(one):
            found = _plus_diagonal(other, one.diagonal())
            if found is not None:
                return found
        if isinstance(one, BlockDiagonal) and len(one.blocks) == 1:
            ((name, block),) = one.blocks.items()
            return BlockDiagonal({name: plus(block, other)})
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
    """Return an approximation of `A + B` with one Kronecker product for every two [T 3.60].

    The sum of two products becomes the product of their averaged factors; other operators are added
    by `plus`.
    """
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        pairs = zip(a.blocks.items(), b.blocks.values(), strict=True)
        return BlockDiagonal({name: average(block, other) for (name, block), other in pairs})
    if isinstance(a, Kronecker) and isinstance(b, Kronecker) and a.shape == b.shape:
        return a.averaged(b)
    return plus(a, b)
