"""Operators against dense linear algebra that is written out here, without their code."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


# --- matrices written out -------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
def test_low_rank_is_a_diagonal_plus_a_product(rank):
    entries, factor = tensor(4).square(), tensor(4, rank)
    close(LowRank(entries, factor).to_dense(), torch.diag(entries) + factor @ factor.mT)


def test_blocks_stand_on_the_diagonal_in_their_order():
    first, second = gram(2), tensor(3).square()
    dense = torch.zeros(5, 5, dtype=torch.float64)
    dense[:2, :2], dense[2:, 2:] = first, torch.diag(second)
    blocks = {"z": Dense(first), "a": Diagonal(second)}
    operator = BlockDiagonal(blocks)
    blocks.clear()
    close(operator.to_dense(), dense)
    assert operator.sizes == {"z": 2, "a": 3}


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), rank=st.integers(0, 4))
def test_kronecker_is_torch_kron(rows, columns, rank):
    out_factor, in_factor = gram(rows, rank), gram(columns, rank)
    product = Kronecker.from_factors(out_factor, in_factor, scale=3.0).add_diagonal(0.5)
    identity = torch.eye(rows * columns, dtype=torch.float64)
    close(product.to_dense(), 3 * torch.kron(out_factor, in_factor) + 0.5 * identity)
    assert product.shape == (rows, columns)


def test_damping_spreads_the_shift_over_both_factors():
    out_factor, in_factor, tau, count = gram(3, 2), gram(2), 0.7, 50.0
    product = Kronecker.from_factors(out_factor, in_factor, scale=count).add_diagonal(tau)
    identities = torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    damped_out = math.sqrt(count) * out_factor + math.sqrt(tau) * identities[0]
    damped_in = math.sqrt(count) * in_factor + math.sqrt(tau) * identities[1]
    damped = product.damped()
    close(damped.to_dense(), torch.kron(damped_out, damped_in))
    # More concentrated in every direction: the difference has no negative eigenvalue.
    assert torch.linalg.eigvalsh(damped.to_dense() - product.to_dense()).min() > -1e-10


def test_damping_has_a_gradient_in_scale_and_shift():
    product = Kronecker.from_factors(gram(3, 2), gram(2))
    numbers = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (4.0, 0.5)]
    assert torch.autograd.gradcheck(
        lambda c, tau: product.scaled(c).add_diagonal(tau).damped().logdet(), numbers
    )


# --- what a linear map's Jacobian needs -----------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("rows", "batch", "positions", "classes"), [
    (1, (), 1, 6), (2, (5,), 1, 2), (1, (2, 3), 4, 1), (2, (0,), 1, 3), (1, (4,), 50, 2),
    (2, (3,), 3, 2),
])  # fmt: skip
def test_factored_variance_is_that_of_the_rows(name, rows, batch, positions, classes):
    precision = OPERATORS[name]()
    rows = rows if precision.size % rows == 0 else 1
    rows, columns = getattr(precision, "shape", (rows, precision.size // rows))
    a, g = tensor(*batch, positions, columns), tensor(*batch, classes, positions, rows)
    jacobian = torch.einsum("...cro,...ri->...coi", g, a).flatten(-2)
    close(precision.inverse_quadratic_factored(a, g), precision.inverse_quadratic(jacobian))


@pytest.mark.parametrize(("positions", "outputs", "inputs", "classes"), [
    (2, 5, 7, 3), (50, 2, 3, 4), (6, 5, 3, 4), (6, 2, 9, 1),
])  # fmt: skip
def test_sums_are_rotated_before_or_after(positions, outputs, inputs, classes):
    precision = Kronecker.from_factors(gram(outputs), gram(inputs)).add_diagonal(0.3)
    a, g = tensor(4, positions, inputs), tensor(4, classes, positions, outputs)
    rows = torch.einsum("ncro,nri->ncoi", g, a).flatten(-2)
    close(precision.inverse_quadratic_factored(a, g), precision.inverse_quadratic(rows))


def test_factored_variance_has_a_gradient_even_at_inputs_of_zero():
    product = Kronecker.from_factors(gram(3, 2), gram(4, 2))
    a, g = torch.stack([torch.zeros(1, 4, dtype=torch.float64), tensor(1, 4)]), tensor(2, 2, 1, 3)
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda tau: product.add_diagonal(tau).inverse_quadratic_factored(a, g), (tau,)
    )


# --- structure is kept ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Kronecker.from_factors(gram(400, 3), gram(500, 3)).add_diagonal(1.0),
        lambda: LowRank(1 + tensor(200_000).square(), tensor(200_000, 3)),
        lambda: BlockDiagonal(
            {
                "kron": Kronecker.from_factors(gram(300, 3), gram(500, 3)).add_diagonal(1.0),
                "diag": Diagonal(1 + tensor(50_000).square()),
            }
        ),
    ],
    ids=["Kronecker", "LowRank", "BlockDiagonal"],
)
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


def test_functional_gradients():
    precision = OPERATORS["Kronecker"]()
    gradient = torch.func.grad(lambda tau: precision.add_diagonal(tau).logdet())(
        torch.tensor(0.5, dtype=torch.float64)
    )
    close(gradient, precision.add_diagonal(0.5).inverse_diagonal().sum())


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


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Kronecker", "Inverse of LowRank"])
def test_draws_come_from_torchs_generator_and_have_the_inverse_as_covariance(kind):
    precision, count = OPERATORS[kind](), 20_000
    torch.manual_seed(3)
    first = precision.sample((4,))
    torch.manual_seed(3)
    close(precision.sample((4,)), first)
    draws = precision.sample((count,))
    covariance = torch.linalg.inv(precision.to_dense())
    variances = covariance.diagonal()
    error = ((torch.outer(variances, variances) + covariance.square()) / count).sqrt()
    assert ((draws.mT @ draws / count - covariance).abs() / error).max() < 6
