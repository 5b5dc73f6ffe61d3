"""Operators made of others: blocks on a diagonal, sums, inverses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.linalg.base import Operator, factorization
from tyxe.linalg.checks import check_small
from tyxe.linalg.matrices import Cholesky, Dense, Diagonal, LowRank


def _alike(parts: Mapping[str, Operator], what: str) -> dict[str, Operator]:
    """Return a copy of some operators by name."""
    check.one_of(what, parts, Mapping, "operators by name")
    return dict(parts)


@dataclass(frozen=True, eq=False, repr=False)
class BlockDiagonal(Operator):
    """Named blocks over the parts of one vector, in their order; `S` has the blocks' roots.

    Errors of a block's methods have its name in their message.

    Args:
        blocks: at least one operator, by name; blocks may be block-diagonal themselves.

    Example:
        >>> from tyxe.linalg import Dense, Diagonal
        >>> precision = BlockDiagonal({
        ...     "weight": Dense(3 * torch.eye(2)), "bias": Diagonal(torch.full((1,), 3.0))
        ... }).add_diagonal(1.0)
        >>> precision.solve(torch.tensor([4.0, 8.0, 12.0]))
        tensor([1., 2., 3.])
        >>> precision.split(torch.arange(3))
        {'weight': tensor([0, 1]), 'bias': tensor([2])}
    """

    blocks: Mapping[str, Operator]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _alike(self.blocks, "blocks"))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each block."""
        return {name: block.size for name, block in self.blocks.items()}

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    @check.arguments
    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Return the blocks' parts of vectors `(..., P)`, of any type, by name."""
        check.shape("x", x, (*x.shape[:-1], self.size), ", the blocks' sizes together")
        return dict(zip(self.blocks, x.split(list(self.sizes.values()), -1), strict=True))

    def _cat(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return vectors `(..., P)` from their parts by name, the inverse of `split`."""
        return torch.cat([parts[name] for name in self.blocks], -1)

    def _matmul(self, x: Tensor) -> Tensor:
        return self._cat(self._each(lambda block, part: block.matmul(part), self.split(x)))

    def _quadratic(self, x: Tensor) -> Tensor:
        terms = self._each(lambda block, part: block.quadratic(part), self.split(x))
        return torch.stack(list(terms.values())).sum(0)

    def diagonal(self) -> Tensor:
        return self._cat(self._each(lambda block: block.diagonal()))

    def to_dense(self) -> Tensor:
        return torch.block_diag(*self._each(lambda block: block.to_dense()).values())

    def logdet(self) -> Tensor:
        return torch.stack(list(self._each(lambda block: block.logdet()).values())).sum()

    def inverse_diagonal(self) -> Tensor:
        return self._cat(self._each(lambda block: block.inverse_diagonal()))

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return self._cat(self._each(lambda block, part: block.inverse_sqrt(part), self.split(z)))

    def _whiten(self, x: Tensor) -> Tensor:
        return self._cat(self._each(lambda block, part: block.whiten(part), self.split(x)))

    def _scaled(self, c: Tensor) -> BlockDiagonal:
        return self._like(blocks=self._each(lambda block: block.scaled(c)))

    def _add_diagonal(self, d: Tensor) -> BlockDiagonal:
        diagonals = self.split(d) if d.dim() else dict.fromkeys(self.blocks, d)
        added = self._each(lambda block, part: block.add_diagonal(part), diagonals)
        return self._like(blocks=added)

    def _each(self, function: Callable[..., Any], *arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function with every block and its arguments, and return the results by name."""
        results = {}
        for name, block in self.blocks.items():
            try:
                results[name] = function(block, *(argument[name] for argument in arguments))
            except ValueError as error:
                raise ValueError(f"block {name!r}: {error}") from error
        return results


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Operator):
    """`A = A_1 + A_2 + ...`, as separate terms: one Kronecker product for each task [T 3.59].

    Products, quadratic forms and the diagonal are sums of those of the terms, without a `P x P`
    matrix. A sum of Kronecker products has no root of its own: methods that need an inverse
    factorise the dense matrix, once and up to 4,096 rows.

    Args:
        terms: at least one operator, by name, all of one size.

    Raises:
        ValueError: from methods that need an inverse, the sum is too large.

    Reference:
        [T] eq. 3.59, 3.63.

    Example:
        >>> from tyxe.linalg import Kronecker
        >>> terms = [Kronecker.from_factors(torch.eye(2), c * torch.eye(3)) for c in (1.0, 2.0)]
        >>> total = Sum({"first": terms[0], "second": terms[1]})
        >>> total.quadratic(torch.ones(6)), total.inverse_diagonal()[0]
        (tensor(18.), tensor(0.3333))
    """

    terms: Mapping[str, Operator]

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", _alike(self.terms, "terms"))

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
        return functools.reduce(torch.add, (term.matmul(x) for term in self.terms.values()))

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

    def _scaled(self, c: Tensor) -> Sum:
        return self._like(terms={name: term.scaled(c) for name, term in self.terms.items()})

    def _add_diagonal(self, d: Tensor) -> Sum:
        return self._like(terms=with_term(self.terms, Diagonal(d.expand(self.size))))


def with_term(terms: Mapping[str, Operator], new: Operator) -> dict[str, Operator]:
    """Return terms with one more; a diagonal is added to a diagonal term if there is one."""
    if isinstance(new, Diagonal):
        for name, term in terms.items():
            if isinstance(term, Diagonal):
                return {**terms, name: term.add_diagonal(new.entries)}
    return {**terms, str(len(terms)): new}


@dataclass(frozen=True, eq=False, repr=False)
class Inverse(Operator):
    """`A = B^-1`: the precision of a Normal with a known covariance `B`.

    Every method calls the opposite one of `B`; `S` is a root of `B`. Adding a diagonal takes a
    dense matrix, which has at most 4,096 rows.

    Args:
        operator: `B`, positive definite.

    Example:
        >>> from tyxe.linalg import LowRank
        >>> covariance = LowRank(torch.ones(2), torch.tensor([[2.0], [2.0]]))
        >>> Inverse(covariance).diagonal(), Inverse(covariance).inverse_diagonal()
        (tensor([0.5556, 0.5556]), tensor([5., 5.]))
    """

    operator: Operator

    @property
    def size(self) -> int:
        return self.operator.size

    @factorization
    def _diagonal(self) -> Tensor:
        return self.operator.inverse_diagonal()

    def _matmul(self, x: Tensor) -> Tensor:
        return self.operator.solve(x)

    def _quadratic(self, x: Tensor) -> Tensor:
        return self.operator.whiten(x).square().sum(-1)

    def diagonal(self) -> Tensor:
        return self._diagonal

    def to_dense(self) -> Tensor:
        white = self.operator.whiten(self._identity())
        return white @ white.mT

    def logdet(self) -> Tensor:
        return -self.operator.logdet()

    def inverse_diagonal(self) -> Tensor:
        return self.operator.diagonal()

    def sample(self, sample_shape: Sequence[int] = (), noise: Tensor | None = None) -> Tensor:
        if noise is None and isinstance(self.operator, LowRank):
            return self.operator.draw(sample_shape)
        return super().sample(sample_shape, noise)

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        operator = self.operator
        if isinstance(operator, Cholesky):
            return z @ operator.lower.mT
        # A root of `B` is `B S`, since `S S^T = B^-1`.
        return operator.matmul(operator.inverse_sqrt(z))

    def _whiten(self, x: Tensor) -> Tensor:
        operator = self.operator
        if isinstance(operator, Cholesky):
            return x @ operator.lower
        return operator.whiten(operator.matmul(x))

    def _scaled(self, c: Tensor) -> Inverse:
        return self._like(operator=self.operator.scaled(c.reciprocal()))

    def _add_diagonal(self, d: Tensor) -> Inverse:
        check_small("an inverse with a diagonal added", self.size, "keep them apart in a Sum")
        total = Dense(self.to_dense()).add_diagonal(d)
        return self._like(operator=Dense(Inverse(total).to_dense()))
