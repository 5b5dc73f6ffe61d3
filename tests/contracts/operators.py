"""The contract of operators."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tyxe.linalg import (
    BlockDiagonal,
    Cholesky,
    Dense,
    Diagonal,
    Inverse,
    Kronecker,
    LowRank,
    Operator,
    Sum,
)
from tyxe.linalg.functions import operator_from_state, operator_state
from tyxe.testing.asserts import assert_close, assert_raises

TOLERANCE = 1e-10
# What is computed of an operator, and of an operator and vectors.
NUMBERS = ("logdet", "diagonal", "inverse_diagonal")
PRODUCTS = ("matmul", "quadratic", "solve", "inverse_sqrt", "whiten", "inverse_quadratic")
BATCHES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (0,))


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return independent standard normals."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_gram(size: int, rank: int, seed: int = 0) -> Tensor:
    """Return a positive semidefinite matrix of a rank, `(size, size)`."""
    rows = random_tensor(rank, size, seed=seed)
    return rows.mT @ rows / rank


def _kronecker(rows: int = 3, columns: int = 4, rank: int = 2) -> Kronecker:
    out_factor, in_factor = random_gram(rows, rank, seed=1), random_gram(columns, rank, seed=2)
    return Kronecker.from_factors(out_factor, in_factor, scale=5.0).add_diagonal(0.5)


def _blocks() -> BlockDiagonal:
    heads = BlockDiagonal({"a/b": _kronecker(2, 3), "": Diagonal(1 + random_tensor(2).square())})
    return BlockDiagonal({"0.weight": Dense(random_gram(4, 9)), "heads": heads})


# Each function makes a positive definite operator.
OPERATORS: dict[str, Callable[[], Operator]] = {
    "Dense": lambda: Dense(random_gram(5, 9)),
    "Diagonal": lambda: Diagonal(0.1 + random_tensor(5).square()),
    "LowRank": lambda: LowRank(0.1 + random_tensor(6).square(), random_tensor(6, 2)),
    "LowRank, more columns than rows": lambda: LowRank(
        0.1 + random_tensor(3).square(), random_tensor(3, 5)
    ),
    "LowRank, rank 0": lambda: LowRank(0.1 + random_tensor(3).square(), random_tensor(3, 0)),
    "Kronecker": _kronecker,
    "Kronecker, full rank": lambda: _kronecker(4, 2, rank=9),
    "Kronecker, one output": lambda: _kronecker(1, 5),
    "Kronecker, damped": lambda: _kronecker().damped(),
    "Kronecker, averaged": lambda: _kronecker(rank=9).averaged(_kronecker()),
    "Cholesky": lambda: Cholesky(random_tensor(4, 4) + 3 * torch.eye(4, dtype=torch.float64)),
    "Inverse of Dense": lambda: Inverse(Dense(random_gram(4, 9))),
    "Inverse of Cholesky": lambda: Inverse(OPERATORS["Cholesky"]()),
    "Inverse of LowRank": lambda: Inverse(OPERATORS["LowRank"]()),
    "Sum of Kronecker": lambda: Sum({"a/b": _kronecker(), "": _kronecker(rank=9)}),
    "Sum of structures": lambda: Sum(
        {"d": Diagonal(0.1 + random_tensor(6).square()), "i": Inverse(OPERATORS["LowRank"]())}
    ),
    "BlockDiagonal": _blocks,
    "BlockDiagonal of sums": lambda: BlockDiagonal({"+": OPERATORS["Sum of Kronecker"]()}),
    "size 1": lambda: Dense(torch.full((1, 1), 2.0, dtype=torch.float64)),
}


def check_operator(make: Callable[[], Operator]) -> None:
    """Assert that a positive definite operator agrees with its dense matrix, to 1e-10."""
    operator = make().to(torch.float64)
    dense = operator.to_dense()
    _check_matrix(operator, dense)
    for batch in BATCHES:
        _check_products(operator, dense, _vectors(operator, *batch))
        _check_inverse(operator, dense.inverse(), _vectors(operator, *batch))
        x = _vectors(operator, *batch, 2)
        what, expected = f"inverse_quadratic of {tuple(x.shape)}", x @ dense.inverse() @ x.mT
        assert_close(operator.inverse_quadratic(x), expected, what, TOLERANCE)
    _check_samples(operator)
    _check_scaled(operator, dense)
    _check_add_diagonal(operator, dense)
    _check_copies(operator)
    _check_precisions(operator)
    _check_arguments(operator)
    _check_gradients(operator)
    for guard in (torch.no_grad, torch.inference_mode):
        _check_gradient_after(guard, operator)


def _vectors(operator: Operator, *batch: int) -> Tensor:
    return random_tensor(*batch, operator.size, seed=3).to(operator.device)


def _number(operator: Operator, value: float) -> Tensor:
    return torch.tensor(value, dtype=operator.dtype, device=operator.device, requires_grad=True)


def _computed(operator: Operator, what: str, x: Tensor) -> Tensor:
    method: Callable[..., Tensor] = getattr(operator, what)
    return method(x) if what in PRODUCTS else method()


def _check_matrix(operator: Operator, dense: Tensor) -> None:
    assert dense.shape == (operator.size, operator.size), f"to_dense has shape {dense.shape}"
    assert dense.dtype == operator.dtype, f"to_dense is {dense.dtype} for {operator.dtype}"
    assert dense.device == operator.device, f"to_dense is on {dense.device}, not {operator.device}"
    assert_close(dense, dense.mT, "to_dense is not symmetric", TOLERANCE)
    least = torch.linalg.eigvalsh(dense).min().item()
    assert least > 0, f"the operator to check has the eigenvalue {least}; add_diagonal first"
    assert_close(operator.diagonal(), dense.diagonal(), "diagonal", TOLERANCE)
    assert_close(operator.logdet(), dense.logdet(), "logdet", TOLERANCE)


def _check_products(operator: Operator, dense: Tensor, x: Tensor) -> None:
    assert_close(operator.matmul(x), x @ dense, f"matmul of {tuple(x.shape)}", TOLERANCE)
    assert_close(operator @ x, x @ dense, f"@ of {tuple(x.shape)}", TOLERANCE)
    expected = (x * (x @ dense)).sum(-1)
    assert_close(operator.quadratic(x), expected, f"quadratic of {tuple(x.shape)}", TOLERANCE)


def _check_inverse(operator: Operator, inverse: Tensor, x: Tensor) -> None:
    shape = tuple(x.shape)
    identity = torch.eye(operator.size, dtype=x.dtype, device=x.device)
    # Row i of the image of the identity is S e_i.
    root = operator.inverse_sqrt(identity).mT
    assert_close(root @ root.mT, inverse, "inverse_sqrt: S S^T is not the inverse", TOLERANCE)
    assert_close(operator.inverse_sqrt(x), x @ root.mT, f"inverse_sqrt of {shape}", TOLERANCE)
    assert_close(operator.whiten(x), x @ root, f"whiten of {shape}", TOLERANCE)
    assert_close(operator.solve(x), x @ inverse, f"solve of {shape}", TOLERANCE)
    assert_close(operator.inverse_diagonal(), inverse.diagonal(), "inverse_diagonal", TOLERANCE)


def _check_samples(operator: Operator) -> None:
    noise = _vectors(operator, 2, 3)
    given = operator.sample((2, 3), noise)
    assert_close(given, operator.inverse_sqrt(noise), "sample of given noise", TOLERANCE)
    one = operator.sample()
    assert one.shape == (operator.size,), f"sample() has shape {tuple(one.shape)}"
    assert bool((one != operator.sample()).any()), "two samples are equal"
    assert_raises(ValueError, lambda: operator.sample((3,), noise), "noise of a wrong shape")


def _refuses(
    error: type[Exception], what: str, method: Callable[[Any], Any], argument: Any
) -> None:
    assert_raises(error, functools.partial(method, argument), f"{method.__name__} of {what}")


def _check_scaled(operator: Operator, dense: Tensor) -> None:
    for c in (3.0, torch.tensor(0.5)):
        _check_derived(operator.scaled(c), operator, c * dense, f"scaled({c})")
    for bad in (-1.0, float("nan"), float("inf"), torch.ones(1)):
        _refuses(ValueError, str(bad), operator.scaled, bad)


def _check_add_diagonal(operator: Operator, dense: Tensor) -> None:
    identity = torch.eye(operator.size, dtype=dense.dtype, device=dense.device)
    for d in (2.0, torch.tensor(0.25)):
        expected = dense + d * identity
        _check_derived(operator.add_diagonal(d), operator, expected, f"add_diagonal({d})")
    vector = 0.1 + _vectors(operator).square()
    try:
        total = operator.add_diagonal(vector)
    except ValueError as error:
        # A structure may refuse a vector, but its error names those that take it.
        missing = [name for name in ('"full"', '"diag"') if name not in str(error)]
        if missing:
            raise AssertionError(f"refusing a diagonal has to name {missing}: {error}") from error
    else:
        _check_derived(total, operator, dense + vector.diag(), "add_diagonal of a vector")
    too_long, matrix = torch.ones(operator.size + 1), torch.ones(2, operator.size)
    for bad in (-1.0, float("nan"), float("inf"), too_long, matrix, -vector):
        _refuses(ValueError, str(bad), operator.add_diagonal, bad)


def _check_derived(derived: Operator, operator: Operator, expected: Tensor, what: str) -> None:
    assert type(derived) is type(operator), f"{what} is a {type(derived).__name__}"
    assert_close(derived.to_dense(), expected, what, TOLERANCE)
    x = _vectors(operator, 2)
    assert_close(derived @ x, x @ expected, f"{what}, matmul", TOLERANCE)
    assert_close(derived.logdet(), expected.logdet(), f"{what}, logdet", TOLERANCE)
    assert_close(derived.solve(x), x @ expected.inverse(), f"{what}, solve", TOLERANCE)


def _saved(operator: Operator) -> Operator:
    buffer = io.BytesIO()
    torch.save(operator_state(operator), buffer)
    buffer.seek(0)
    return operator_from_state(torch.load(buffer, weights_only=True))


def _check_copies(operator: Operator) -> None:
    # Cached factorisations and gradients must not prevent a copy.
    derived = operator.scaled(_number(operator, 2.0))
    derived.logdet()
    copies = {
        "deepcopy": copy.deepcopy(derived),
        "pickle": pickle.loads(pickle.dumps(derived)),
        "a saved state": _saved(derived),
        "detach": derived.detach(),
    }
    for what, other in copies.items():
        assert type(other) is type(operator), f"{what} is a {type(other).__name__}"
        assert torch.equal(other.to_dense(), derived.to_dense()), f"{what} changed the matrix"
        assert torch.equal(other.logdet(), derived.logdet()), f"{what} changed the inverse"
        assert not other.logdet().requires_grad, f"{what} kept the gradient's history"


def _check_precisions(operator: Operator) -> None:
    single = operator.to(torch.float32)
    x = _vectors(single, 2).float()
    results = {what: _computed(single, what, x) for what in (*NUMBERS, *PRODUCTS)}
    others = {"sample": single.sample(), "scaled": single.scaled(2.0).add_diagonal(1.0).to_dense()}
    for what, value in (results | others).items():
        assert value.dtype == torch.float32, f"{what} is {value.dtype} in float32"
        assert value.device == operator.device, f"{what} is on {value.device}"
    again = operator.to(torch.float32)  # without factorisations
    with torch.autocast(x.device.type, torch.bfloat16):
        for what in (*NUMBERS, *PRODUCTS):
            found = _computed(again, what, x)
            assert_close(found, results[what], f"{what} inside of autocast", 1e-6)
        assert_close(again.to_dense(), single.to_dense(), "to_dense inside of autocast", 1e-6)
    assert_close(single.to_dense().double(), operator.to_dense(), "to(float32)", 1e-6)
    assert operator.to("meta").device.type == "meta", "to moves something else than all tensors"
    assert_raises(TypeError, lambda: operator.to(torch.float16), "to(float16)")


def _check_arguments(operator: Operator) -> None:
    x = _vectors(operator, 2)
    longer = torch.cat([x, x[..., :1]], -1)
    for method in (getattr(operator, name) for name in PRODUCTS):
        _refuses(ValueError, "a wrong size", method, longer)
        _refuses(ValueError, "size 0", method, x[..., :0])
        _refuses(ValueError, "one number", method, x.sum())
        _refuses(TypeError, "another type", method, x.float())


def _check_gradients(operator: Operator) -> None:
    x = _vectors(operator, 2)
    numbers = (_number(operator, 1.3), _number(operator, 0.7))
    for what in (*NUMBERS, *PRODUCTS):

        def derived(c: Tensor, tau: Tensor, what: str = what) -> Tensor:
            return _computed(operator.scaled(c).add_diagonal(tau), what, x)

        right = torch.autograd.gradcheck(derived, numbers, raise_exception=False)
        assert right, f"the gradient of {what} in scale and diagonal"


def _check_gradient_after(guard: Callable[[], Any], operator: Operator) -> None:
    tau = _number(operator, 0.7)
    derived = operator.add_diagonal(tau)
    with guard():
        derived.solve(_vectors(operator))
    (gradient,) = torch.autograd.grad(derived.logdet(), tau)
    expected = derived.detach().inverse_diagonal().sum()
    what = f"the gradient of logdet after a solve under {guard.__name__}"
    assert_close(gradient, expected, what, TOLERANCE)
