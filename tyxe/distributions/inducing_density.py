"""Densities of weights whose inducing weights are integrated out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tyxe.distributions.inducing_formulas import Side
from tyxe.util import precise


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


def density_block(
    difference: Tensor, rows: Side, columns: Side, which: slice, scales: tuple[Tensor, Tensor]
) -> DensityBlock:
    """Return the part of a layer, or of its columns `which`, in a density.

    `difference` is `W / s` less its means, `(..., K, rows, columns)`; `columns` has the factors of
    all columns; `scales` are `lambda`, and `s` by column.
    """
    b_r, h_r, b_c, h_c = map(precise, (*rows[:2], *columns[:2]))
    (scale, prior_scales), own, others = map(precise, scales), b_c[which], b_c.clone()
    others[which] = 0.0
    deviation = difference / scale
    row_gram, identity = b_r.mT @ b_r, torch.eye(len(h_c)).to(h_c)
    # I - B^T B = (I - B_r^T B_r) x I + B_r^T B_r x (I - B_o^T B_o), with B_o of these columns.
    unexplained = torch.kron(h_r @ h_r.mT, identity) + torch.kron(
        row_gram, h_c @ h_c.mT + others.mT @ others
    )
    log_scale = (scale * prior_scales).log().sum() + len(own) * math.log(2 * math.pi) / 2
    return DensityBlock(
        deviation.square().sum((-1, -2)),
        (b_r.mT @ deviation @ own).flatten(-2),
        torch.kron(row_gram, own.mT @ own),
        unexplained,
        scale,
        len(b_r) * log_scale,
    )
