"""The algebra of inducing weights [T 4.2, appendix C]: plain functions of matrices."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Side", "conditional_divergence", "inducing_side", "matheron", "precise"]


class Side(NamedTuple):
    """What the rows, or the columns, of a layer's matrix have to do with those of `U`.

    Attributes:
        basis: `B = Z^T C^-T`, `(d, M)`, where `C C^T = Psi = Z Z^T + D^2`.
        residual: `H = C^-1 D`, `(M, M)`; `B^T B + H H^T = I`.
        tril: `C`, `(M, M)`.
    """

    basis: Tensor
    residual: Tensor
    tril: Tensor


def inducing_side(z: Tensor, log_d: Tensor) -> Side:
    r"""Factorise `Psi = Z Z^T + D^2` [T 4.21] with one Cholesky.

    Whatever `M` and `d`: in double precision, because `Psi` is nearly singular where `M` reaches
    `d` and `D` is small. All that is returned has a norm of order one.

    Args:
        z: `Z`, `(M, d)`.
        log_d: logarithms of `D`'s diagonal, `(M,)`.

    Example:
        >>> side = inducing_side(torch.ones(1, 3), torch.zeros(1))
        >>> side.tril, side.residual
        (tensor([[2.]]), tensor([[0.5000]]))
    """
    wide = precise(z)
    d = torch.diag(log_d.to(wide.dtype).exp())
    tril, info = torch.linalg.cholesky_ex(wide @ wide.mT + d.square())
    # To raise here would make an accelerator wait; what is not a number is found later.
    tril = torch.where(info == 0, tril, torch.nan)
    solved = torch.linalg.solve_triangular(tril, torch.cat([wide, d], 1), upper=False)
    basis, residual = solved.to(z.dtype).split([z.shape[1], len(z)], 1)
    return Side(basis.mT, residual, tril.to(z.dtype))


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, which Apple's GPUs have not."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def matheron(rows: Side, columns: Side, u: Tensor, noise: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    r"""Return `U_w - lambda Ub_w` of [T 4.31] mapped by the rows, for prior noise of scale lambda.

    `Wb = s E1` and `Ub = Z_r E1 Z_c^T + Z_r E2 D_c + D_r E3 C_c^T` have the joint prior: the last
    two terms are those three of [T 4.33] with factors of `Z Z^T`, drawn without them. Whitened,
    `Ub_w = C_r^-1 Ub C_c^-T = B_r^T (E1 B_c + E2 H_c^T) + H_r E3`.

    Args:
        rows: of the matrix.
        columns: likewise.
        u: draws of the whitened inducing weights, `(..., M_r, M_c)`.
        noise: `lambda` times `E1 (..., d_r, d_c)`, `E2 (..., d_r, M_c)` and `E3 (..., M_r, M_c)`.

    Returns:
        `B_r (U_w - lambda Ub_w)`, `(..., d_r, M_c)`; times `B_c^T`, with `lambda E1` added, it is a
        draw of `W / s`.
    """
    e1, e2, e3 = noise
    prior = rows.basis.mT @ (e1 @ columns.basis + e2 @ columns.residual.mT)
    return rows.basis @ (u - (prior + rows.residual @ e3))


def conditional_divergence(scale: Tensor, count: int) -> Tensor:
    r"""Return `R(lambda) = d (lambda^2/2 - log lambda - 1/2)` [T 4.29], in nats.

    It is the KL of `q(W|U) = N(m, lambda^2 S)` from `p(W|U) = N(m, S)`, whatever `U`.

    Args:
        scale: `lambda`, positive.
        count: `d`, the number of weights.

    Example:
        >>> conditional_divergence(torch.tensor(1.0), 10)
        tensor(0.)
    """
    return count * (scale.square() / 2 - scale.log() - 0.5)
