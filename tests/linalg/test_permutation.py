"""The same operator with its rows in another order."""

import pytest
import torch

from tyxe.linalg import BlockDiagonal, Cholesky, Dense, Diagonal, Kronecker, LowRank
from tyxe.linalg.permutation import permuted

pytestmark = pytest.mark.usefixtures("double")

SIZE = 6
OPERATORS = {
    "diagonal": (lambda: Diagonal(torch.rand(SIZE)), Diagonal),
    "low rank": (lambda: LowRank(torch.rand(SIZE), torch.randn(SIZE, 2)), LowRank),
    "Cholesky": (lambda: Cholesky(torch.randn(SIZE, SIZE).tril() + 3 * torch.eye(SIZE)), LowRank),
    "Kronecker": (lambda: Kronecker.from_factors(torch.eye(2), 2 * torch.eye(3)), Dense),
    "blocks": (
        lambda: BlockDiagonal({"a": Diagonal(torch.rand(2)), "b": Dense(torch.eye(4))}),
        Dense,
    ),
}


@pytest.mark.parametrize(("make", "kind"), OPERATORS.values(), ids=OPERATORS.keys())
def test_rows_and_columns_move_together(make, kind):
    operator, order = make(), torch.randperm(SIZE)
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
