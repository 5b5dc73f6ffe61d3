"""Sums, averages and other orders against dense matrices, in the structure that they can keep."""

import functools
import itertools

import pytest
import torch

from tyxe.linalg import BlockDiagonal, Cholesky, Dense, Diagonal, Kronecker, LowRank, Sum
from tyxe.linalg.functions import average, invertible, is_diagonal, permuted, plus

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
pytestmark = pytest.mark.usefixtures("double")


def spd(size):
    root = torch.randn(size, size)
    return root @ root.mT + torch.eye(size)


def kronecker(rows=2, columns=3):
    return Kronecker.from_factors(spd(rows), spd(columns))


# Positive definite, of six rows.
OPERATORS = {
    "constant": lambda: Diagonal(torch.tensor(0.7).expand(6)),
    "diagonal": lambda: Diagonal(0.5 + torch.rand(6)),
    "dense": lambda: Dense(spd(6)),
    "low rank": lambda: LowRank(0.5 + torch.rand(6), torch.randn(6, 2)),
    "kronecker": kronecker,
    "damped": lambda: kronecker().add_diagonal(torch.tensor(0.4)),
    "sum": lambda: Sum({"first": kronecker(), "second": kronecker(3, 2)}),
    "one block": lambda: BlockDiagonal({"all": kronecker()}),
    "blocks": lambda: BlockDiagonal({"a": kronecker(1, 2), "b": Dense(spd(4))}),
    "other blocks": lambda: BlockDiagonal({"a": Diagonal(torch.rand(4)), "b": Dense(spd(2))}),
}


def assert_is(operator, matrix):
    """Compare all that an operator does with its dense matrix."""
    x, inverse = torch.randn(4, 6), torch.linalg.inv(matrix)
    close(operator.to_dense(), matrix)
    close(operator.matmul(x), x @ matrix)
    close(operator.diagonal(), matrix.diagonal())
    close(operator.logdet(), torch.linalg.slogdet(matrix).logabsdet)
    close(operator.inverse_diagonal(), inverse.diagonal())
    close(operator.solve(x), x @ inverse)
    root = operator.inverse_sqrt(torch.eye(6))
    close(root.mT @ root, inverse)


@pytest.mark.parametrize("names", [*itertools.product(OPERATORS, repeat=2)], ids=" + ".join)
def test_plus_is_the_sum_of_the_matrices(names):
    a, b = (OPERATORS[name]() for name in names)
    assert_is(plus(a, b), a.to_dense() + b.to_dense())


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("diagonal", "constant", Diagonal),
        ("diagonal", "low rank", LowRank),
        ("diagonal", "kronecker", Sum),
        ("constant", "kronecker", Kronecker),
        ("constant", "damped", Kronecker),
        ("dense", "kronecker", Dense),
        ("kronecker", "damped", Sum),
        ("blocks", "diagonal", BlockDiagonal),
        ("one block", "sum", BlockDiagonal),
        ("blocks", "other blocks", Sum),
    ],
)
def test_plus_keeps_the_structure_that_it_can(one, other, kind):
    a, b = OPERATORS[one](), OPERATORS[other]()
    assert isinstance(plus(a, b), kind)
    assert isinstance(plus(b, a), kind)


def test_diagonals_of_a_sum_are_one_term():
    total = plus(plus(kronecker(), OPERATORS["diagonal"]()), kronecker())
    again = plus(total, OPERATORS["diagonal"]())
    assert [type(term) for term in again.terms.values()] == [Kronecker, Diagonal, Kronecker]


def test_average_is_of_the_factors_weighed_by_their_scales():
    factors = [[spd(2), spd(3)] for _ in range(2)]
    scales, shifts = (3.0, 1.0), (0.2, 0.5)
    a, b = (
        Kronecker.from_factors(*pair, scale=scale).add_diagonal(torch.tensor(shift))
        for pair, scale, shift in zip(factors, scales, shifts, strict=True)
    )
    left, right = ((3 * one + other) / 4 for one, other in zip(*factors, strict=True))
    merged = average(BlockDiagonal({"w": a}), BlockDiagonal({"w": b})).blocks["w"]
    assert isinstance(merged, Kronecker)
    assert_is(merged, 4 * torch.kron(left, right) + 0.7 * torch.eye(6))


def test_average_of_anything_else_is_the_sum():
    a, b = kronecker(), OPERATORS["dense"]()
    assert_is(average(a, b), a.to_dense() + b.to_dense())


def test_what_is_known_by_structure():
    assert is_diagonal(BlockDiagonal({"a": OPERATORS["diagonal"]()}))
    assert not is_diagonal(OPERATORS["blocks"]())
    large = Sum({"0": Diagonal(torch.ones(5000)), "1": Diagonal(torch.ones(5000))})
    assert not invertible(large)
    assert not invertible(BlockDiagonal({"a": large}))
    assert invertible(OPERATORS["sum"]())


ORDERED = {
    "diagonal": (OPERATORS["diagonal"], Diagonal),
    "low rank": (OPERATORS["low rank"], LowRank),
    "Cholesky": (lambda: Cholesky(torch.randn(6, 6).tril() + 3 * torch.eye(6)), LowRank),
    "kronecker": (kronecker, Dense),
    "blocks": (OPERATORS["blocks"], Dense),
}


@pytest.mark.parametrize(("make", "kind"), ORDERED.values(), ids=ORDERED.keys())
def test_rows_and_columns_move_together(make, kind):
    operator, order = make(), torch.randperm(6)
    found = permuted(operator, order)
    assert isinstance(found, kind)
    torch.testing.assert_close(found.to_dense(), operator.to_dense()[order][:, order])
    back = permuted(found, order.argsort())
    torch.testing.assert_close(back.to_dense(), operator.to_dense())


def test_a_large_operator_without_a_form_for_it_is_refused(monkeypatch):
    monkeypatch.setattr("tyxe.linalg.checks.SMALL", 5)
    operator = Kronecker.from_factors(torch.eye(2), torch.eye(3))
    with pytest.raises(ValueError, match="another order of a Kronecker"):
        permuted(operator, torch.arange(operator.size))
