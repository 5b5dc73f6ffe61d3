"""What operators refuse, what they say then, and what they save."""

import pytest
import torch

from tests.contracts.operators import OPERATORS, PRODUCTS, check_operator
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank
from tyxe.linalg.functions import STATE_NAMES, operator_from_state, operator_state
from tyxe.threads import unvalidated

NAN, INF = float("nan"), float("inf")
EYE, UPPER, ONES = torch.eye(2), torch.ones(2, 2).triu(), torch.ones(2)
kron = Kronecker.from_factors


def with_bases(out_eigenvalues, in_eigenvalues):
    return Kronecker(EYE, EYE, out_eigenvalues, in_eigenvalues, EYE[0, 0], EYE[0, 0])


# --- constructors ---------------------------------------------------------------------------------

REFUSED = {
    "dense, no matrix": (lambda: Dense(torch.ones(3)), r"expected \(3, 3\)"),
    "dense, number": (lambda: Dense(torch.tensor(1.0)), r"shape \(\)"),
    "dense, batch": (lambda: Dense(torch.ones(2, 3, 3)), r"shape \(2, 3, 3\)"),
    "dense, not symmetric": (lambda: Dense(UPPER / 2), "not symmetric: .* up to 0.5; symmetrise"),
    "dense, nan": (lambda: Dense(EYE * NAN), "the matrix has 4 elements that are not finite"),
    "diagonal, matrix": (lambda: Diagonal(EYE), r"shape \(2, 2\); expected \(P,\)"),
    "diagonal, negative": (lambda: Diagonal(-2 * ONES), "goes down to -2; expected 0 or more"),
    "diagonal, inf": (lambda: Diagonal(INF * ONES), "2 elements that are not finite"),
    "low rank, sizes": (lambda: LowRank(torch.ones(3), torch.ones(2, 1)), r"expected \(3, R\)"),
    "low rank, negative": (lambda: LowRank(-torch.ones(3), torch.ones(3, 1)), "expected 0 or more"),
    "low rank, nan": (lambda: LowRank(ONES, EYE * NAN), "the factor has 4"),
    "kron, not square": (lambda: kron(torch.ones(2, 3), EYE), "the output factor has shape"),
    "kron, nan": (lambda: kron(EYE, EYE / 0), "the input factor has 4 elements"),
    "kron, not symmetric": (lambda: kron(UPPER, EYE), "the output factor is not symmetric"),
    "kron, indefinite": (lambda: kron(EYE, -EYE), "input factor is not positive semi-.* is -1"),
    "kron, scale": (lambda: kron(EYE, EYE, scale=-1.0), "the scale goes down to -1"),
    "kron, eigenvalues": (lambda: with_bases(-ONES, ONES), "out_eigenvalues goes down to -1"),
    "kron, basis": (lambda: with_bases(ONES, torch.ones(3)), r"the input .*; expected \(3, 3\)"),
    "dense, list": (lambda: Dense([[1.0]]), "the matrix is a list; expected a tensor"),
    "blocks, list": (lambda: BlockDiagonal([]), "blocks is a list; expected operators by name"),
    "vectors, list": (lambda: Dense(EYE).solve([1.0]), "is a list; expected a tensor of vectors"),
    "noise": (lambda: Dense(EYE).sample((2,), 1.0), "noise is 1.0; expected a tensor or None"),
    "shape of samples": (lambda: Dense(EYE).sample(2), "sample_shape is 2; expected a sequence"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_constructors_refuse(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_types_without_factorisations(dtype):
    bad = torch.ones(1, 1, dtype=dtype)
    for make in (lambda: Dense(bad), lambda: Diagonal(bad[0]), lambda: kron(bad, EYE)):
        with pytest.raises(TypeError, match=r"use \.to\(torch.float32\)"):
            make()


def test_rounding_is_not_asymmetry():
    rows = torch.randn(1000, 50)
    gram = torch.einsum("ni,nj->ij", rows, rows)
    rounded = gram * (1 + 1e-6 * torch.randn(50, 50))
    torch.testing.assert_close(Dense(rounded).to_dense(), gram, rtol=1e-5, atol=1e-5)


# --- singular operators ---------------------------------------------------------------------------

ZERO = torch.tensor([1.0, 0.0])
SINGULAR = {
    "Dense": (lambda: Dense(torch.diag(ZERO)), "smallest eigenvalue is 0"),
    "Diagonal": (lambda: Diagonal(ZERO), "smallest eigenvalue is 0"),
    "LowRank": (lambda: LowRank(ZERO, torch.ones(2, 1)), "the diagonal matrix is not positive"),
    "Kronecker": (lambda: kron(EYE[:1, :1], torch.diag(ZERO)), "the Kronecker product is not pos"),
    "BlockDiagonal": (lambda: BlockDiagonal({"a": Diagonal(ZERO)}), "block 'a': the diagonal"),
}


@pytest.mark.parametrize(("make", "message"), SINGULAR.values(), ids=SINGULAR.keys())
def test_a_singular_operator_has_no_inverse_until_a_diagonal_is_added(make, message):
    operator, x = make(), torch.ones(1, 2)
    for method in ("quadratic", "matmul"):
        assert bool(getattr(operator, method)(x).isfinite().all())
    for method in ("logdet", "inverse_diagonal", "sample", "solve", "whiten", "inverse_quadratic"):
        given = (x,) if method in PRODUCTS else ()
        with pytest.raises(ValueError, match=rf"{message}(.|\n)*add_diagonal"):
            getattr(operator, method)(*given)
    check_operator(lambda: make().add_diagonal(0.5))


INDEFINITE = {
    **{name: make for name, (make, _) in SINGULAR.items()},
    "Dense, negative": lambda: Dense(torch.diag(torch.tensor([1.0, -3.0]))),
    "Diagonal, negative": lambda: Diagonal(torch.tensor([1.0, -3.0])),
    "LowRank, infinite": lambda: LowRank(torch.ones(2), torch.full((2, 1), torch.inf)),
}


@pytest.mark.parametrize("make", INDEFINITE.values(), ids=INDEFINITE.keys())
def test_without_checks_of_numbers_results_are_not_finite(make):
    refused = pytest.raises(ValueError, match=r"finite|definite|0 or more")
    with unvalidated():
        assert not make().logdet().isfinite()
        with unvalidated(False), refused:
            make().logdet()


def test_without_checks_of_numbers_good_results_are_the_same():
    rows, x = torch.randn(3, 5), torch.ones(1, 3)
    for make in (lambda: Dense(rows @ rows.mT), lambda: LowRank(rows[:, 0].square(), rows)):
        with unvalidated():
            found = make().logdet(), make().whiten(x)
        assert all(map(torch.equal, found, (make().logdet(), make().whiten(x))))


def test_a_matrix_beyond_the_accuracy_of_its_type_says_so():
    with pytest.raises(ValueError, match="smallest eigenvalue is -3; add a prior precision"):
        Dense(torch.diag(torch.tensor([1.0, -3.0]))).logdet()
    # Rounding decides the sign of what eigvalsh finds: either message names the remedy.
    rows = torch.randn(2, 50)
    nearly = Dense(1e6 * rows.mT @ rows).add_diagonal(1e-6)
    with pytest.raises(ValueError, match="larger"):
        nearly.logdet()
    assert nearly.to(torch.float64).add_diagonal(1.0).logdet().isfinite()


# --- arguments ------------------------------------------------------------------------------------


def test_kronecker_names_the_structures_that_take_a_diagonal():
    product = OPERATORS["Kronecker"]()
    vector = torch.linspace(1.0, 2.0, product.size)
    with pytest.raises(ValueError, match=r'one number for its whole diagonal.*"full" or "diag"'):
        product.add_diagonal(vector)
    with pytest.raises(ValueError, match=r"block 'net\.0\.weight': a Kronecker product takes one"):
        BlockDiagonal({"net.0.weight": product}).add_diagonal(vector)


# --- state ----------------------------------------------------------------------------------------


def test_states_are_flat_and_name_blocks_in_full():
    state = operator_state(OPERATORS["BlockDiagonal"]())
    assert {key.rpartition("/")[0] for key in state} == {"0.weight", "heads/a%2Fb", "heads/"}
    assert list(operator_from_state(state).blocks["heads"].blocks) == ["a/b", ""]


def test_states_of_something_else():
    with pytest.raises(ValueError, match="structure is 'sparse'; expected one of 'dense', 'diag"):
        operator_from_state({"sparse.matrix": EYE})
    with pytest.raises(ValueError, match="not finite"):
        operator_from_state({"a/dense.matrix": EYE * NAN})


class Doubled(Diagonal):
    """A structure of a user's own, with a fault to find."""

    def logdet(self):
        return 2 * super().logdet()


def test_a_structure_of_ones_own_takes_a_name(monkeypatch):
    operator = Doubled(torch.ones(2))
    with pytest.raises(
        TypeError, match=r'no name .*functions\.STATE_NAMES\["doubled"\] = Doubled$'
    ):
        operator_state(operator)
    monkeypatch.setitem(STATE_NAMES, "doubled", Doubled)
    assert list(operator_state(operator)) == ["doubled.entries"]
    assert type(operator_from_state(operator_state(operator))) is Doubled
