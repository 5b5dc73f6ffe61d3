"""The algebra of inducing weights [T 4.2, appendix C]: plain functions of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tyxe.util import precise


class Side(NamedTuple):
    """The factors that map the rows (or the columns) of `U` to those of a layer's matrix.

    Attributes:
        basis: `B = Z^T C^-T`, `(d, M)`, where `C C^T = Psi = Z Z^T + D^2`.
        residual: `H = C^-1 D`, `(M, M)`; `B^T B + H H^T = I`.
        tril: `C`, `(M, M)`.
    """

    basis: Tensor
    residual: Tensor
    tril: Tensor


def identity(size: int, like: Tensor) -> Tensor:
    """Return an identity matrix."""
    return torch.diag(like.new_ones(size))


def inducing_side(z: Tensor, log_d: Tensor) -> Side:
    """Factorise `Psi = Z Z^T + D^2` [T 4.21] from `Z`, `(M, d)`, and the logarithms of `D`, `(M,)`.

    The Cholesky is in double precision, because `Psi` is nearly singular where `M` is close to `d`
    and `D` is small. The factors have norms of order one.
    """
    wide = precise(z)
    d = torch.diag(log_d.to(wide.dtype).exp())
    tril, info = torch.linalg.cholesky_ex(wide @ wide.mT + d.square())
    # An error here would have to wait for the accelerator; NaNs are reported later.
    tril = torch.where(info == 0, tril, torch.nan)
    solved = torch.linalg.solve_triangular(tril, torch.cat([wide, d], 1), upper=False)
    basis, residual = solved.to(z.dtype).split([z.shape[1], len(z)], 1)
    return Side(basis.mT, residual, tril.to(z.dtype))


def matheron(rows: Side, columns: Side, u: Tensor, noise: Sequence[Tensor]) -> Tensor:
    """Return `B_r (U_w - lambda Ub_w)`, `(..., d_r, M_c)`, of [T 4.31] for whitened draws `U_w`.

    `Wb = s E1` and `Ub = Z_r E1 Z_c^T + Z_r E2 D_c + D_r E3 C_c^T` have the joint prior: the last
    two terms have the distribution of the three of [T 4.33], without factors of `Z Z^T`. Whitened,
    `Ub_w = C_r^-1 Ub C_c^-T = B_r^T (E1 B_c + E2 H_c^T) + H_r E3`. The result times `B_c^T`, plus
    `lambda E1`, is a draw of `W / s`.

    Args:
        rows: factors of the rows.
        columns: factors of the columns.
        u: draws of `U_w`, `(..., M_r, M_c)`.
        noise: `lambda` times `E1 (..., d_r, d_c)`, `E2 (..., d_r, M_c)` and `E3 (..., M_r, M_c)`.
    """
    e1, e2, e3 = noise
    prior = rows.basis.mT @ (e1 @ columns.basis + e2 @ columns.residual.mT)
    return rows.basis @ (u - (prior + rows.residual @ e3))


def conditional_divergence(scale: Tensor, count: int) -> Tensor:
    """Return `R(lambda) = d (lambda^2/2 - log lambda - 1/2)` [T 4.29] of `d` weights, in nats.

    It is the KL of `q(W|U) = N(m, lambda^2 S)` from `p(W|U) = N(m, S)`, which does not depend on
    `U`.
    """
    return count * (scale.square() / 2 - scale.log() - 0.5)


class DensityBlock(NamedTuple):
    """A layer's part of the density `N(B mu, lambda^2 (I - B B^T) + B S B^T)` of its weights.

    Attributes:
        square: `|v|^2`, `v = (w - B mu) / lambda`, by component.
        projected: `B^T v`.
        gram: `B^T B`.
        unexplained: `I - B^T B`, computed without the difference.
        scale: `lambda`.
        log_normalizer: logarithm of `(2 pi)^(d/2)` times the weights' scales.
    """

    square: Tensor
    projected: Tensor
    gram: Tensor
    unexplained: Tensor
    scale: Tensor
    log_normalizer: Tensor


def mixture_log_density(blocks: Sequence[DensityBlock], covariance: Tensor) -> Tensor:
    """Return the log-density of the weights of layers whose inducing weights are Gaussian.

    With `T = S/lambda^2 - I`: `det(I + B T B^T) = det(I + T B^T B)`, and
    `v^T (I + B T B^T)^-1 v = |v|^2 - (B^T v)^T (I + T B^T B)^-1 T B^T v`. `covariance` is the `S`
    of all inducing weights, in the order of the blocks. Components have equal weights.
    """
    inverse_scale = torch.cat([(1 / b.scale).expand(len(b.gram)) for b in blocks])
    scaled = inverse_scale[:, None] * covariance.to(inverse_scale) * inverse_scale
    gram = torch.block_diag(*(b.gram for b in blocks))
    inner = torch.block_diag(*(b.unexplained for b in blocks)) + scaled @ gram
    projected = torch.cat([b.projected for b in blocks], -1)
    mapped = projected @ scaled - projected
    solved = torch.linalg.solve(inner, mapped.reshape(-1, len(inner)).mT).mT.reshape(mapped.shape)
    squares = torch.stack([b.square for b in blocks]).sum(0) - (projected * solved).sum(-1)
    constant = torch.stack([b.log_normalizer for b in blocks]).sum()
    logs = -0.5 * (squares + torch.linalg.slogdet(inner)[1]) - constant
    return torch.logsumexp(logs, -1) - math.log(logs.shape[-1])
