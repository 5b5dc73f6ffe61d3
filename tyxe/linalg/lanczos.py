"""Eigenpairs and log-determinants of matrices that are known by their products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tyxe.errors import warn

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
