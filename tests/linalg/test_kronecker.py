"""Kronecker products: sums of factored rows turned before or after."""

import pytest
import torch

import tyxe


@pytest.mark.parametrize(("positions", "outputs", "inputs", "classes"), [
    (2, 5, 7, 3), (50, 2, 3, 4), (6, 5, 3, 4), (6, 2, 9, 1),
])  # fmt: skip
def test_sums_are_turned_before_or_after(positions, outputs, inputs, classes):
    torch.manual_seed(0)
    sizes = outputs, inputs
    factors = [(r := torch.randn(s, s).double()) @ r.mT for s in sizes]
    precision = tyxe.linalg.Kronecker.from_factors(*factors).add_diagonal(0.3)
    a = torch.randn(4, positions, inputs).double()
    g = torch.randn(4, classes, positions, outputs).double()
    rows = torch.einsum("ncro,nri->ncoi", g, a).flatten(-2)
    torch.testing.assert_close(
        precision.inverse_quadratic_summed(a, g), precision.inverse_quadratic(rows)
    )


def test_factored_rows_of_the_wrong_size_are_refused():
    kron = tyxe.linalg.Kronecker.from_factors(torch.eye(2), torch.eye(3)).add_diagonal(1.0)
    with pytest.raises(ValueError, match=r"expected inputs \(..., R, 3\)"):
        kron.inverse_quadratic_summed(torch.ones(4, 5, 2), torch.ones(4, 1, 5, 2))
    with pytest.raises(ValueError, match="do not make rows of 6 elements"):
        tyxe.linalg.Dense(torch.eye(6)).inverse_quadratic_factored(
            torch.ones(4, 2), torch.ones(4, 1, 2)
        )
