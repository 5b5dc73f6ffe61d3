"""Formulas for Kronecker products, by the eigenbases of their factors."""

from __future__ import annotations

import torch
from torch import Tensor


def kron_eigenvalues(d_g: Tensor, d_a: Tensor, scale: Tensor) -> Tensor:
    """Return the eigenvalues `scale * d_g d_a^T` of a product, `(out, in)` [GLM A.3]."""
    return torch.outer(scale * d_g, d_a)


def kron_rotate(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left X right^T` for `X`, `(..., out, in)`: `(left kron right) vec(X)`, row-major."""
    return left @ (x @ right.mT)


def kron_diagonal(u_g: Tensor, u_a: Tensor, values: Tensor) -> Tensor:
    """Return the diagonal of `(U_g kron U_a) diag(values) (U_g kron U_a)^T`, `(out, in)`."""
    return kron_rotate(values, u_g.square(), u_a.square())


def kron_variance(a: Tensor, g: Tensor, eigenvalues: Tensor) -> Tensor:
    """Return `sum_oi g_co g_c'o a_i^2 / eigenvalues_oi`, `(..., C, C)`.

    In the eigenbases `a` is `(..., in)`, `g` `(..., C, out)` and `eigenvalues` `(out, in)`.
    """
    per_output = a.square() @ eigenvalues.reciprocal().mT
    # Without a square root, whose derivative is infinite at inputs of zero.
    return (g * per_output.unsqueeze(-2)) @ g.mT


def kron_rotate_summed(a: Tensor, g: Tensor, u_a: Tensor, u_g: Tensor) -> Tensor:
    """Return `U_g^T (sum_r g_cr a_r^T) U_a`, `(..., C, out, in)`.

    `a` is `(..., R, in)` and `g` `(..., C, R, out)`. Each side is rotated before or after the sum,
    whichever has fewer rows.
    """
    count, positions, rows = g.shape[-3:]
    a_first, g_first = positions <= count * rows, positions <= a.shape[-1]
    if a_first:
        a = (u_a.mT @ a.mT).mT
    gradients = g.mT
    if g_first:
        gradients = u_g.mT @ gradients
    sums = (gradients.flatten(-3, -2) @ a).unflatten(-2, (count, rows))
    if not a_first:
        sums = sums @ u_a
    return sums if g_first else u_g.mT @ sums


def clipped_eigh(factor: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, and eigenvectors in columns, of a positive semi-definite matrix.

    Eigenvalues that are negative by rounding are set to 0; others raise a ValueError about `what`.
    """
    # float32 has errors of 1e-6 times the largest eigenvalue, in which the smallest are lost, and a
    # small prior precision is of their size. float64 takes about as long.
    values, vectors = torch.linalg.eigh(factor.double())
    # Elements are sums over thousands of points, whose rounding a small side has as well.
    steps = max(100, factor.shape[-1])
    numbers = torch.finfo(factor.dtype)
    # Below the smallest normal number the spacing is no finer: factors of a net that died.
    rounding = steps * numbers.eps * values.abs().max().clamp_min(numbers.smallest_normal)
    if values.min() < -rounding:
        raise ValueError(
            f"{what} is not positive semi-definite: its smallest eigenvalue is "
            f"{values.min().item():.3g} (the largest {values.max().item():.3g})"
        )
    # Contiguous, as after saving and loading, so that products round in the same way.
    return values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype).contiguous()
