"""The algebra of Kronecker products by their eigenbases."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "clipped_eigh",
    "kron_diagonal",
    "kron_eigenvalues",
    "kron_rotate",
    "kron_rotate_summed",
    "kron_variance",
]


def kron_eigenvalues(d_g: Tensor, d_a: Tensor, scale: Tensor) -> Tensor:
    """Return the eigenvalues `scale * d_g d_a^T` of a product, `(out, in)` [GLM A.3].

    Example:
        >>> kron_eigenvalues(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0]), torch.tensor(1.0))
        tensor([[0., 3.],
                [0., 6.]])
    """
    return torch.outer(scale * d_g, d_a)


def kron_rotate(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left X right^T`, that is `(left kron right) vec(X)` for row-major `vec`.

    Args:
        x: matrices `(..., out, in)`.
        left: `(out, out)`.
        right: `(in, in)`.

    Example:
        >>> x, left, right = torch.ones(2, 3), torch.rand(2, 2), torch.rand(3, 3)
        >>> torch.allclose(kron_rotate(x, left, right).flatten(),
        ...                torch.kron(left, right) @ x.flatten())
        True
    """
    return left @ (x @ right.mT)


def kron_diagonal(u_g: Tensor, u_a: Tensor, values: Tensor) -> Tensor:
    """Return the diagonal of `(U_g kron U_a) diag(values) (U_g kron U_a)^T`, `(out, in)`.

    Example:
        >>> kron_diagonal(torch.eye(2), torch.eye(3), torch.ones(2, 3)).sum()
        tensor(6.)
    """
    return kron_rotate(values, u_g.square(), u_a.square())


def kron_variance(a: Tensor, g: Tensor, eigenvalues: Tensor) -> Tensor:
    r"""Return `sum_oi g_co g_c'o a_i^2 / eigenvalues_oi`, `(..., C, C)`.

    Args:
        a: `(..., in)`, in the eigenbasis.
        g: `(..., C, out)`, in the eigenbasis.
        eigenvalues: `(out, in)`.

    Example:
        >>> kron_variance(torch.ones(3), torch.ones(1, 2), torch.full((2, 3), 0.5))
        tensor([[12.]])
    """
    per_output = a.square() @ eigenvalues.reciprocal().mT
    # Not a product of one root with itself: the root's derivative is infinite at inputs of zero.
    return (g * per_output.unsqueeze(-2)) @ g.mT


def kron_rotate_summed(a: Tensor, g: Tensor, u_a: Tensor, u_g: Tensor) -> Tensor:
    r"""Return `U_g^T (sum_r g_cr a_r^T) U_a`, `(..., C, out, in)`.

    Each side is turned before or after the sum, whichever are fewer rows.

    Args:
        a: `(..., R, in)`.
        g: `(..., C, R, out)`.
        u_a: `(in, in)`.
        u_g: `(out, out)`.

    Example:
        >>> a, g, u_a, u_g = (torch.rand(s) for s in ((5, 3), (4, 5, 2), (3, 3), (2, 2)))
        >>> sums = torch.einsum("cro,ri->coi", g, a)
        >>> torch.allclose(kron_rotate_summed(a, g, u_a, u_g), u_g.mT @ sums @ u_a)
        True
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

    Eigenvalues that rounding made negative are raised to 0.

    Args:
        factor: `(n, n)`.
        what: its name in the error.

    Raises:
        ValueError: an eigenvalue is too negative for rounding.

    Example:
        >>> clipped_eigh(torch.diag(torch.tensor([2.0, 0.0])), "the factor")[0]
        tensor([0., 2.])
    """
    # float32 leaves errors of 1e-6 times the largest eigenvalue, on which the smallest, those
    # that a small prior precision competes with, are lost. float64 takes about as long.
    values, vectors = torch.linalg.eigh(factor.double())
    rounding = factor.shape[-1] * torch.finfo(factor.dtype).eps * values.abs().max()
    if values.min() < -rounding:
        raise ValueError(
            f"{what} is not positive semi-definite: its smallest eigenvalue is "
            f"{values.min().item():.3g} (the largest {values.max().item():.3g})"
        )
    # Row after row in memory, as they are once saved and loaded: products then round alike.
    return values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype).contiguous()
