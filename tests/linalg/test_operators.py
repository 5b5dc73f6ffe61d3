"""Operators against dense linear algebra that is written out here, without their code."""

import functools
import math

import pytest
import torch
from torch.autograd import forward_ad

from tests.contracts.operators import OPERATORS, check_operator
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, LowRank
from tyxe.linalg.functions import plus

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", OPERATORS.values(), ids=OPERATORS.keys())
def test_contract(make):
    check_operator(make)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_contract_on_a_gpu():
    for make in OPERATORS.values():
        check_operator(lambda make=make: make().to("cuda"))


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64)


def gram(size, rank=None):
    rows = tensor(size if rank is None else rank, size)
    return rows.mT @ rows


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
def test_matrices_written_out(rank):
    entries, factor = tensor(4).square(), tensor(4, rank)
    close(LowRank(entries, factor).to_dense(), torch.diag(entries) + factor @ factor.mT)
    factors = gram(3, rank), gram(2, rank)
    product = Kronecker.from_factors(*factors, scale=3.0).add_diagonal(0.5)
    close(product.to_dense(), 3 * torch.kron(*factors) + 0.5 * torch.eye(6).double())
    assert product.shape == (3, 2)


def test_blocks_stand_on_the_diagonal_in_their_order():
    first, second = gram(2), tensor(3).square()
    blocks = {"z": Dense(first), "a": Diagonal(second)}
    operator = BlockDiagonal(blocks)
    blocks.clear()
    close(operator.to_dense(), torch.block_diag(first, torch.diag(second)))
    assert operator.sizes == {"z": 2, "a": 3}


def test_damping_spreads_the_shift_over_both_factors():
    factors, tau, count = (gram(3, 2), gram(2)), 0.7, 50.0
    product = Kronecker.from_factors(*factors, scale=count).add_diagonal(tau)
    damped = [
        math.sqrt(count) * factor + math.sqrt(tau) * torch.eye(len(factor)).double()
        for factor in factors
    ]
    found = product.damped().to_dense()
    close(found, torch.kron(*damped))
    # More concentrated in every direction: the difference has no negative eigenvalue.
    assert torch.linalg.eigvalsh(found - product.to_dense()).min() > -1e-10


def test_damping_has_a_gradient_in_scale_and_shift():
    product = Kronecker.from_factors(gram(3, 2), gram(2))
    numbers = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (4.0, 0.5)]
    assert torch.autograd.gradcheck(
        lambda c, tau: product.scaled(c).add_diagonal(tau).damped().logdet(), numbers
    )


# --- what a linear map's Jacobian needs -----------------------------------------------------------


def assert_factored_variance(precision, batch, positions, classes, rows):
    a = tensor(*batch, positions, precision.size // rows)
    g = tensor(*batch, classes, positions, rows)
    jacobian = torch.einsum("...cro,...ri->...coi", g, a).flatten(-2)
    close(precision.inverse_quadratic_factored(a, g), precision.inverse_quadratic(jacobian))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("rows", "batch", "positions", "classes"),
    [(1, (), 1, 6), (2, (5,), 1, 2), (1, (2, 3), 4, 1), (2, (0,), 1, 3), (1, (4,), 50, 2)],
)
def test_factored_variance_is_that_of_the_rows(name, rows, batch, positions, classes):
    precision = OPERATORS[name]()
    rows = rows if precision.size % rows == 0 else 1
    rows, _ = getattr(precision, "shape", (rows, 0))
    assert_factored_variance(precision, batch, positions, classes, rows)


@pytest.mark.parametrize(
    ("positions", "outputs", "inputs", "classes"),
    [(2, 5, 7, 3), (50, 2, 3, 4), (6, 5, 3, 4), (6, 2, 9, 1)],
)
def test_sums_are_rotated_before_or_after(positions, outputs, inputs, classes):
    precision = Kronecker.from_factors(gram(outputs), gram(inputs)).add_diagonal(0.3)
    assert_factored_variance(precision, (4,), positions, classes, outputs)


def test_factored_variance_has_a_gradient_even_at_inputs_of_zero():
    product = Kronecker.from_factors(gram(3, 2), gram(4, 2))
    a, g = torch.stack([torch.zeros(1, 4, dtype=torch.float64), tensor(1, 4)]), tensor(2, 2, 1, 3)
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda tau: product.add_diagonal(tau).inverse_quadratic_factored(a, g), (tau,)
    )


LARGE = {
    "Kronecker": lambda: Kronecker.from_factors(gram(400, 3), gram(500, 3)).add_diagonal(1.0),
    "LowRank": lambda: LowRank(1 + tensor(200_000).square(), tensor(200_000, 3)),
    "BlockDiagonal": lambda: BlockDiagonal(
        {
            "kron": Kronecker.from_factors(gram(300, 3), gram(500, 3)).add_diagonal(1.0),
            "diag": Diagonal(1 + tensor(50_000).square()),
        }
    ),
}


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_nothing_of_size_p_times_p_is_formed(make):
    # 200,000 rows and columns would take 298 GiB.
    operator = make()
    assert operator.size == 200_000
    x = tensor(2, operator.size)
    close(operator @ operator.solve(x), x, rtol=1e-6, atol=1e-6)
    results = [
        operator.logdet(),
        operator.inverse_diagonal(),
        operator.diagonal(),
        operator.quadratic(x),
        operator.inverse_quadratic(x),
        operator.sample((2,)),
        operator.scaled(2.0).add_diagonal(1.0).logdet(),
    ]
    assert all(bool(result.isfinite().all()) for result in results)


# --- rounding -------------------------------------------------------------------------------------


def test_factors_of_deficient_rank_have_no_negative_eigenvalues():
    rows = torch.randn(3, 40)
    product = Kronecker.from_factors(rows.mT @ rows, rows.mT @ rows)
    assert product.out_eigenvalues.dtype == torch.float32
    assert product.out_eigenvalues.min() >= 0
    tiny = product.add_diagonal(1e-6)
    assert tiny.logdet().isfinite()
    assert (tiny.inverse_diagonal() > 0).all()


def test_float32_factors_keep_the_small_eigenvalues():
    # 1e-3 beside 1e5: float32's own eigh returns it with an error of the order of 1e-2.
    basis = torch.linalg.qr(tensor(60, 60)).Q
    values = torch.logspace(-3, 5, 60, dtype=torch.float64)
    factor = ((basis * values) @ basis.mT).float()
    product = Kronecker.from_factors(torch.ones(1, 1), (factor + factor.mT) / 2)
    exact = torch.linalg.eigvalsh(((factor + factor.mT) / 2).double()).clamp_min(0)
    torch.testing.assert_close(product.in_eigenvalues, exact.float(), rtol=1e-6, atol=1e-9)


# --- gradients ------------------------------------------------------------------------------------


def test_vectors_have_gradients_where_they_are_taken():
    for name in ("Dense", "Diagonal", "LowRank"):
        operator = OPERATORS[name]()
        d = tensor(operator.size).square().requires_grad_()
        assert torch.autograd.gradcheck(lambda d, a=operator: a.add_diagonal(d).logdet(), (d,))


def test_another_factor_has_its_derivative_in_forward_mode_too():
    product, factor, slope = OPERATORS["Kronecker"](), gram(3), gram(3)

    def logdet(c):
        return product.with_out_factor(factor + c * slope).logdet()

    zero = torch.tensor(0.0, dtype=torch.float64)
    close(torch.func.jacfwd(logdet)(zero), torch.func.grad(logdet)(zero))


def test_each_element_of_a_diagonal_has_its_share_of_a_derivative():
    product, d = OPERATORS["Kronecker"](), torch.full((12,), 0.5, dtype=torch.float64)
    expected = product.add_diagonal(0.5).inverse_diagonal()

    def logdet(d):
        return plus(product, Diagonal(d)).logdet()

    close(torch.func.jacfwd(logdet)(d), expected)
    close(torch.func.grad(logdet)(d), expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(logdet(forward_ad.make_dual(d, expected))).tangent
    close(found, expected.square().sum())


def test_gradients_run_into_the_vectors_too():
    precision = OPERATORS["BlockDiagonal"]()
    x = tensor(2, precision.size).requires_grad_()
    assert torch.autograd.gradcheck(precision.inverse_quadratic, (x,))
    assert torch.autograd.gradcheck(precision.quadratic, (x,))


def test_draws_have_the_inverse_as_covariance():
    precision, count = OPERATORS["Kronecker"](), 20_000
    draws = precision.sample((count,))
    covariance = torch.linalg.inv(precision.to_dense())
    variances = covariance.diagonal()
    error = ((torch.outer(variances, variances) + covariance.square()) / count).sqrt()
    assert ((draws.mT @ draws / count - covariance).abs() / error).max() < 6
