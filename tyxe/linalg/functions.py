"""Functions of operators: sums, traces, orders of rows, states; eigenpairs and log-determinants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.errors import warn
from tyxe.files import FORMS
from tyxe.linalg.base import Operator
from tyxe.linalg.checks import check_small, is_small
from tyxe.linalg.composite import BlockDiagonal, Inverse, Sum, with_term
from tyxe.linalg.kronecker import Kronecker, has_derivative, is_one_number
from tyxe.linalg.matrices import Cholesky, Dense, Diagonal, LowRank


def _pairs(a: Operator, b: Operator) -> dict[str, tuple[Operator, Operator]]:
    """Return the blocks of two operators that have the same, by the names of `a`, or nothing."""
    if isinstance(a, BlockDiagonal) and isinstance(b, BlockDiagonal) and a.sizes == b.sizes:
        return dict(
            zip(a.blocks, zip(a.blocks.values(), b.blocks.values(), strict=True), strict=True)
        )
    return {}


def invertible(operator: Operator) -> bool:
    """Whether the methods of an operator that need an inverse work at its size."""
    if isinstance(operator, BlockDiagonal):
        return all(map(invertible, operator.blocks.values()))
    return not isinstance(operator, Sum) or is_small(operator.size)


def is_diagonal(operator: Operator) -> bool:
    """Whether an operator is diagonal by its structure."""
    if isinstance(operator, BlockDiagonal):
        return all(map(is_diagonal, operator.blocks.values()))
    return isinstance(operator, Diagonal)


def _plus_diagonal(operator: Operator, entries: Tensor) -> Operator | None:
    """Return an operator of the same structure with a diagonal added, or None if there is none."""
    if isinstance(operator, BlockDiagonal):
        parts = operator.split(entries)
        pairs = ((name, block, parts[name]) for name, block in operator.blocks.items())
        return BlockDiagonal({name: plus(block, Diagonal(part)) for name, block, part in pairs})
    if isinstance(operator, Diagonal | Dense | LowRank | Sum):  # which take any diagonal
        return operator.add_diagonal(entries)
    if isinstance(operator, Kronecker) and is_one_number(entries):
        # With gradients, each element of the diagonal has its share.
        return operator.add_diagonal(entries if has_derivative(entries) else entries[0])
    return None


def plus(a: Operator, b: Operator) -> Operator:
    """Return `A + B`: block by block, in the structure of one of them if possible, else as a `Sum`.

    A Kronecker product can add a diagonal of one number; with any other the result is a `Sum`.
    Operators that differ in size, type or device are a ValueError.
    """
    pairs = _pairs(a, b)
    if pairs:
        return BlockDiagonal({name: plus(*pair) for name, pair in pairs.items()})
    for one, other in ((a, b), (b, a)):
        if is_diagonal(one):
            found = _plus_diagonal(other, one.diagonal())
            if found is not None:
                return found
        if isinstance(one, BlockDiagonal) and len(one.blocks) == 1:
            ((name, block),) = one.blocks.items()
            return BlockDiagonal({name: plus(block, other)})
        if isinstance(one, Dense):
            return Dense(one.matrix + other.to_dense())
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return LowRank(a.entries + b.entries, torch.cat([a.factor, b.factor], 1))
    if isinstance(a, Sum):
        terms = a.terms
        for term in b.terms.values() if isinstance(b, Sum) else [b]:
            terms = with_term(terms, term)
        return Sum(terms)
    return plus(b, a) if isinstance(b, Sum) else Sum({"0": a, "1": b})


def average(a: Operator, b: Operator) -> Operator:
    """Return an approximation of `A + B` with one Kronecker product for every two [T 3.60].

    The sum of two products becomes the product of their averaged factors; other operators are added
    by `plus`.
    """
    pairs = _pairs(a, b)
    if pairs:
        return BlockDiagonal({name: average(*pair) for name, pair in pairs.items()})
    if isinstance(a, Kronecker) and isinstance(b, Kronecker) and a.shape == b.shape:
        return a.averaged(b)
    return plus(a, b)


def trace_of_solve(a: Operator, b: Operator) -> Tensor:
    """Return `tr(A B^-1)`, the expectation of `w^T A w` for `w` of precision `B`.

    No dense matrix is formed where one of the two is diagonal, both are Kronecker products, `A` is
    of low rank, or `B` is the inverse of a covariance of low rank or of a Cholesky factor; blocks
    and terms are summed.

    Raises:
        NotImplementedError: it needs a dense matrix of more than 4,096 rows.
    """
    with full_precision(a._first_tensor()):
        return _trace(a, b)


def _trace(a: Operator, b: Operator) -> Tensor:
    if isinstance(a, Sum):
        return torch.stack([_trace(term, b) for term in a.terms.values()]).sum()
    pairs = _pairs(a, b)
    if pairs:
        return torch.stack([_trace(*pair) for pair in pairs.values()]).sum()
    if isinstance(a, Diagonal):
        return a.entries @ b.inverse_diagonal()
    if isinstance(a, LowRank):
        return a.entries @ b.inverse_diagonal() + b.whiten(a.factor.mT).square().sum()
    if isinstance(b, Diagonal):
        return a.diagonal() @ b.inverse_diagonal()
    if isinstance(a, Kronecker) and isinstance(b, Kronecker) and a.shape == b.shape:
        return _kronecker_trace(a, b)
    return _covariance_trace(a, b)


def _kronecker_trace(a: Kronecker, b: Kronecker) -> Tensor:
    """Return the trace in the eigenbases of `B`, where only the diagonal of `A` is needed."""
    out_rotation, in_rotation = b.out_basis.mT @ a.out_basis, b.in_basis.mT @ a.in_basis
    out_diagonal = out_rotation.square() @ a.out_eigenvalues
    in_diagonal = in_rotation.square() @ a.in_eigenvalues
    diagonal = a.scale * torch.outer(out_diagonal, in_diagonal) + a.shift
    return (diagonal * b.inverse_eigenvalues).sum()


def _covariance_trace(a: Operator, b: Operator) -> Tensor:
    """Return `sum_r c_r^T A c_r` over the columns of a root of the covariance."""
    covariance = b.operator if isinstance(b, Inverse) else None
    if isinstance(covariance, LowRank):
        return a.diagonal() @ covariance.entries + a.quadratic(covariance.factor.mT).sum()
    if isinstance(covariance, Cholesky):
        return a.quadratic(covariance.lower.mT).sum()
    if not is_small(b.size):
        raise NotImplementedError(
            f"the trace of a {type(a).__name__} by a {type(b).__name__} of {b.size:,} rows takes a "
            "dense matrix"
        )
    return a.quadratic(b.inverse_sqrt(b._identity())).sum()


def permuted(operator: Operator, order: Tensor) -> Operator:
    """Return `A[order][:, order]` for a permutation `order`, `(P,)`, of the rows.

    Diagonals and factors keep their form. All others become dense matrices, of at most
    4,096 rows; larger ones raise a ValueError.
    """
    if isinstance(operator, Diagonal):
        return Diagonal(operator.entries[order])
    if isinstance(operator, LowRank):
        return LowRank(operator.entries[order], operator.factor[order])
    if isinstance(operator, Cholesky):
        return LowRank(operator.lower.new_zeros(operator.size), operator.lower[order])
    check_small(f"another order of a {type(operator).__name__}", operator.size, "keep its order")
    return Dense(operator.to_dense()[order][:, order])


# Names of structures in states. Add a class of your own, whose fields are tensors, under a new one.
STATE_NAMES: dict[str, type[Operator]] = {
    "dense": Dense,
    "diagonal": Diagonal,
    "low_rank": LowRank,
    "kronecker": Kronecker,
    "cholesky": Cholesky,
}


# Quoted names have neither of these characters.
_TERM, _INVERSE = "+", "!"


def _parts(operator: Operator) -> dict[str, Operator] | None:
    """Return the operators inside one by the part of their key before the slash, or None."""
    if isinstance(operator, BlockDiagonal):
        return {quote(name, safe=""): block for name, block in operator.blocks.items()}
    if isinstance(operator, Sum):
        return {_TERM + quote(name, safe=""): term for name, term in operator.terms.items()}
    return {_INVERSE: operator.operator} if isinstance(operator, Inverse) else None


def _made_of(parts: dict[str, Operator]) -> Operator:
    if _INVERSE in parts:
        return Inverse(parts[_INVERSE])
    named = {unquote(name.removeprefix(_TERM)): part for name, part in parts.items()}
    return Sum(named) if any(name.startswith(_TERM) for name in parts) else BlockDiagonal(named)


def operator_state(operator: Operator) -> dict[str, Tensor]:
    """Return an operator as tensors by name, detached; `operator_from_state` is the inverse.

    The keys are `structure.field`, and for a block `block/structure.field`, for a term
    `+term/...` and for an inverse `!/...`. A class that is not in `STATE_NAMES` is a TypeError.
    """
    parts = _parts(operator)
    if parts is not None:
        return {
            f"{name}/{key}": tensor
            for name, part in parts.items()
            for key, tensor in operator_state(part).items()
        }
    names = {structure: name for name, structure in STATE_NAMES.items()}
    if type(operator) not in names:
        kind = type(operator).__name__
        raise TypeError(
            f"{kind} has no name in a state: give it one in each program that saves or loads it, "
            f'tyxe.linalg.functions.STATE_NAMES["{kind.lower()}"] = {kind}'
        )
    prefix = names[type(operator)]
    return {f"{prefix}.{name}": value for name, value in operator.detach()._fields().items()}


def operator_from_state(state: Mapping[str, Tensor]) -> Operator:
    """Return the operator whose `operator_state` this is."""
    if any("/" in key for key in state):
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            name, _, rest = key.partition("/")
            parts.setdefault(name, {})[rest] = tensor
        return _made_of({name: operator_from_state(part) for name, part in parts.items()})
    (name,) = {key.partition(".")[0] for key in state}
    structure = STATE_NAMES[check.choice("structure", name, STATE_NAMES)]
    return structure(**{key.partition(".")[2]: tensor for key, tensor in state.items()})


FORMS[Operator] = operator_state, operator_from_state


# Columns of the basis that are rotated at once.
COLUMNS = 2**16
# Products of random vectors that show whether an eigenvalue larger than those known is left.
LOOKED = 3
# From vectors `(S, P)` to the products of a symmetric `P x P` matrix with each, `(S, P)`.
Product = Callable[[Tensor], Tensor]


def largest_eigenpairs(
    product: Product, start: Tensor, count: int, tolerance: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalues, `(R,)` in descending order, and unit vectors, `(R, P)`.

    This is block Lanczos with full orthogonalisation, restarted from the best Ritz vectors (Wu &
    Simon 2000). Ritz values are never above the eigenvalues. Of an eigenvalue with a higher
    multiplicity than the block has vectors, the others are found from new random vectors, which
    follow until some of them lead to nothing larger than what is known.

    Args:
        product: that of a matrix which is positive semi-definite up to rounding; it returns a new
            tensor.
        start: random vectors to start from, `(block, P)`.
        count: number of pairs; there are fewer where others are zero up to rounding.
        tolerance: of the residual of a pair, `|A v - l v| <= tolerance l`, whose square is about
            the relative error of `l`. A warning says where it is not reached.

    Raises:
        ValueError: an eigenvalue is negative, by more than rounding.
    """
    block, size = start.shape
    count, rounding = min(count, size), torch.finfo(start.dtype).eps
    # So many Ritz vectors are kept in a restart. Much more room saves no products.
    kept = min(count + block, size)
    basis = start.new_empty(min(count + _spare(block), size), size)
    room, filled = len(basis), 0
    projected = torch.zeros(room, room, dtype=torch.float64, device="cpu")
    new = _orthonormal(start, basis[:0])
    # Steps from the last random vectors, and the sum of the eigenvalues known before.
    steps, known_sum = 0, -math.inf
    most = 50 + 5 * count // block  # about twice as many as are usual
    for step in range(1, most + 1):
        stop = filled + len(new)
        basis[filled:stop] = new
        known, image = basis[:stop], product(new)
        coefficients = image @ known.mT
        projected[filled:stop, :stop] = coefficients.to(projected)
        projected[:stop, filled:stop] = coefficients.mT.to(projected)
        values, rotation = (x.flip(-1) for x in torch.linalg.eigh(projected[:stop, :stop]))
        floor = rounding * float(values.abs().max())
        # Zeros are the rest of the matrix only if other directions have no product either.
        is_rest_zero = float(image.norm(dim=1).max()) <= floor
        image.addmm_(coefficients, known, alpha=-1)
        image.addmm_(image @ known.mT, known, alpha=-1)
        # What products with the basis have outside of it comes from its last block.
        lengths = torch.linalg.qr(image.mT, mode="r").R.to(rotation)
        outside = (lengths @ rotation[filled:stop, :count]).norm(dim=0)
        is_close = bool((outside <= (tolerance * values[:count]).clamp_min(floor)).all())
        steps += 1
        found = steps >= LOOKED and stop >= count and is_close and float(values[count - 1]) > floor
        total = float(values[:count].sum())
        is_new = total > known_sum + tolerance * float(values[count - 1 : count].sum())
        if stop == size or is_rest_zero or (found and not is_new):
            break
        if step == most:  # before the basis changes, which the rotation is of
            warn(f"of {count} eigenpairs the smallest have not converged, and are too small")
            break
        filled = stop
        # A block of which only a part fits would lose what products have outside of the basis.
        if found or (room < size and stop + block > room):
            filled = count if found else kept
            _rotate(basis, rotation[:, :filled])
            projected.zero_()[:filled, :filled] = values[:filled].diag_embed()
        if found:
            steps, known_sum = 0, total
            image.zero_()
        # Where nothing is left of a vector, a random one takes its place.
        generator = torch.Generator(device="cpu").manual_seed(step)
        other = torch.randn(image.shape, generator=generator, device="cpu").to(image)
        image.add_(other, alpha=floor / size**0.5)
        new = _orthonormal(image[: room - filled], basis[:filled])
    if float(values[-1]) < -1e4 * floor:
        raise ValueError(
            f"the curvature has an eigenvalue of {float(values[-1]):.3g}, and that of a posterior "
            "has none below zero: take curvature='ggn', which is positive semi-definite"
        )
    count = min(count, int((values > floor).sum()))
    _rotate(basis, rotation[:, :count])
    return values[:count].to(start), basis[:count]


def vectors_in_memory(count: int, block: int) -> int:
    """Return how many vectors `largest_eigenpairs` and its products hold."""
    return count + _spare(block) + 7 * block


def _spare(block: int) -> int:
    """Return for how many vectors beside those that are asked for a basis has room."""
    return max(20, 5 * block)


def _rotate(basis: Tensor, rotation: Tensor) -> None:
    """Let the first vectors of a basis be others, given by their coefficients in it, `(R, C)`."""
    for piece in basis.split(COLUMNS, 1):  # in place, since a second basis might not fit
        piece[: rotation.shape[1]] = rotation.mT.to(piece) @ piece[: len(rotation)]


def _orthonormal(vectors: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of what vectors have outside of those known."""
    for _ in range(3):
        vectors = torch.addmm(vectors, vectors @ known.mT, known, alpha=-1)
        vectors = torch.linalg.qr(vectors.mT).Q.mT
    return vectors


def logdet_by_quadrature(product: Product, probes: Tensor, num_steps: int) -> Tensor:
    """Return an estimate of `log det A` for each probe `z`, `(S,)`, by Lanczos quadrature.

    Each is `|z|^2 sum_k w_k log l_k`, with the Ritz values of `num_steps` Lanczos steps from `z`
    and the squares `w_k` of their vectors' first elements. For probes of independent elements of
    variance 1 its expectation is the log-determinant, up to the quadrature's own error.
    """
    norms, tiny = probes.norm(dim=1), torch.finfo(probes.dtype).tiny
    vector, before, beta = probes / norms[:, None], torch.zeros_like(probes), norms.new_zeros(())
    diagonal, beside = [], []
    for _ in range(min(num_steps, probes.shape[1])):
        image = product(vector) - beta[..., None] * before
        diagonal.append((image * vector).sum(1))
        image = image - diagonal[-1][:, None] * vector
        beta = image.norm(dim=1)
        beside.append(beta)
        # Of a probe inside of an invariant subspace rounding is left, which has no weight below.
        before, vector = vector, image / beta.clamp_min(tiny)[:, None]
    middle, off = (torch.stack(x, 1).double() for x in (diagonal, beside))
    upper = off[:, :-1].diag_embed(1)
    values, rotation = torch.linalg.eigh(middle.diag_embed() + upper + upper.mT)
    logs = rotation[:, 0].square() * values.clamp_min(tiny).log()
    return (norms.double().square() * logs.sum(1)).to(probes)
