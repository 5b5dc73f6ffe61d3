"""Products of a program that the linear algebra is slow at."""

import pytest
import torch

from tyxe.program import _traced

BMM = torch.ops.aten.bmm.default


def flat_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a product as a matrix, which is a view that the product's strides have to allow."""
    return torch.bmm(left, right).view(len(left), -1)


@pytest.mark.parametrize(("columns", "is_turned"), [(2, True), (15, True), (1, False), (16, False)])
def test_products_of_few_columns_are_computed_transposed(columns: int, is_turned: bool) -> None:
    left, right = torch.randn(3, 40, 7), torch.randn(3, 7, columns)
    graph = _traced(flat_product, [left, right])
    (product,) = graph.graph.find_nodes(op="call_function", target=BMM)
    assert (product.args[0].target is torch.ops.aten.transpose.int) == is_turned
    torch.testing.assert_close(graph(left, right), flat_product(left, right))


def test_products_of_fewer_rows_than_columns_are_left_as_they_are() -> None:
    graph = _traced(flat_product, [torch.randn(3, 2, 7), torch.randn(3, 7, 5)])
    (product,) = graph.graph.find_nodes(op="call_function", target=BMM)
    assert all(one.op == "placeholder" for one in product.args)
