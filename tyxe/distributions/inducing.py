"""Weights of a layer given few inducing weights: the posterior of [T 4.2]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions.inducing_density import DensityBlock, density_block, mixture_log_density
from tyxe.distributions.inducing_formulas import Side, conditional_divergence, matheron, precise
from tyxe.distributions.inducing_u import InducingU, SampleShape
from tyxe.distributions.joint import JointDistribution, SiteProduct
from tyxe.distributions.layer_matrix import LayerMatrix
from tyxe.distributions.normal_kl import known_numbers

__all__ = ["InducingWeights", "has_prior_of", "isotropic_scale"]


class InducingWeights(JointDistribution):
    r"""A layer's weights given inducing weights `U ~ q(U)`, whose prior is `N(0, s^2)`.

    `q(W|U) = N(s Z_r^T Psi_r^-1 U Psi_c^-1 Z_c, lambda^2 Cov[W|U])` [T 4.28, C.2], drawn by the
    extended Matheron rule [T 4.31]. All factors are formed before it: any number of draws costs
    no Cholesky. Its KL from the prior is that over `W` and `U` together, `R(lambda) + KL[q(U)
    || p(U)]`, an upper bound of that over `W`; densities are those of `W`, `U` integrated out.

    Args:
        u: the distribution of the whitened `U_w = C_r^-1 U C_c^-T`, `(M_r, M_c)`.
        rows: see `inducing_side`.
        columns: likewise.
        conditional_scale: `lambda`; None makes `W` a function of `U`, and leaves `R` out.
        layer: names, shapes and `s` of its sites.
        weight: of `R` in the KL, 1 but for the function-space form [T 4.40].

    Reference:
        [T] 4.2 and appendix C.

    Example:
        >>> from tyxe.distributions.inducing_formulas import inducing_side
        >>> from tyxe.distributions.inducing_u import DiagonalU
        >>> side = inducing_side(torch.ones(1, 2), torch.zeros(1))
        >>> u = DiagonalU(torch.zeros(1, 1), torch.zeros(1, 1))
        >>> layer = LayerMatrix("net.weight", Size([2, 2]), weight_scale=3.0)
        >>> q = InducingWeights(u, side, side, torch.tensor(1.0), layer)  # this is the prior
        >>> q.variance.round(), q.kl_from_prior()
        (tensor([[9., 9.],
                [9., 9.]]), tensor(0.))
    """

    def __init__(
        self,
        u: InducingU,
        rows: Side,
        columns: Side,
        conditional_scale: Tensor | None,
        layer: LayerMatrix,
        weight: float = 1.0,
    ) -> None:
        self.u, self.layer, self.weight = u, layer, weight
        # One by one: what moves and copies a distribution's tensors looks into no named tuple.
        self.row_basis, self.row_residual, self.row_tril = rows
        self.column_basis, self.column_residual, self.column_tril = columns
        self.conditional_scale = conditional_scale
        super().__init__(layer.names, Size(layer.shape))

    @property
    def rows(self) -> Side:
        """The factors of the rows."""
        return Side(self.row_basis, self.row_residual, self.row_tril)

    @property
    def columns(self) -> Side:
        """The factors of the columns."""
        return Side(self.column_basis, self.column_residual, self.column_tril)

    def separate(self, value: Tensor) -> dict[str, Tensor]:
        return self.layer.separate(value)

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([self.layer.as_columns(n, values[n]) for n in self.names], -1)

    def _scale(self) -> float | Tensor:
        return self.layer.scale_of_columns(self.row_basis)

    @property
    def mean(self) -> Tensor:
        """Elementwise mean."""
        return self.row_basis @ self.u.mean @ self.column_basis.mT * self._scale()

    @property
    def variance(self) -> Tensor:
        """Elementwise variance."""
        variance = self.u.variance_through(self.row_basis, self.column_basis)
        if self.conditional_scale is not None:
            explained = torch.outer(
                self.row_basis.square().sum(1), self.column_basis.square().sum(1)
            )
            variance = variance + self.conditional_scale.square() * (1 - explained)
        scale = self._scale()
        return variance * (scale * scale)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        """Draw `U`, then `W`, with gradients."""
        return self.sample_given(self.u.rsample(sample_shape))

    def sample_given(self, u: Tensor) -> Tensor:
        """Draw `W` for a draw of the whitened inducing weights, `(..., M_r, M_c)`."""
        if self.conditional_scale is None:
            return self.row_basis @ u @ self.column_basis.mT * self._scale()
        batch, (d_r, d_c) = u.shape[:-2], self.layer.shape
        shapes = (d_r, d_c), (d_r, u.shape[-1]), u.shape[-2:]
        noise = [self.conditional_scale * u.new_empty((*batch, *s)).normal_() for s in shapes]
        left = matheron(self.rows, self.columns, u, (noise[0], noise[1], noise[2]))
        scale = self._scale()
        if isinstance(scale, float) and not batch:  # the usual case, in one pass
            right = self.column_basis.mT
            return torch.addmm(noise[0], left, right, beta=scale, alpha=scale)
        return (noise[0] + left @ self.column_basis.mT) * scale

    # ------------------------------------------------------------------ divergence

    def conditional_kl(self) -> Tensor:
        """Return the weighted `R(lambda)`."""
        if self.conditional_scale is None:
            return self.row_basis.new_zeros(())
        count = math.prod(self.layer.shape)
        return self.weight * conditional_divergence(self.conditional_scale, count)

    def kl_from_prior(self) -> Tensor:
        """Return `R(lambda) + KL[q(U) || p(U)]`, in nats."""
        return self.conditional_kl() + self.u.kl(None, None)

    # ------------------------------------------------------------------ densities

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of the matrix; costs the cube of `M_r M_c`."""
        means, covariance = self.u.components()
        return mixture_log_density([self.density_block(value, means)], covariance).to(value.dtype)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        means, covariance = self.u.components()
        matrix, which = self.layer.as_columns(name, value), self.layer.columns_of(name)
        return mixture_log_density([self.density_block(matrix, means, which)], covariance).to(
            value.dtype
        )

    def density_block(
        self, value: Tensor, means: Tensor, which: slice = slice(None)
    ) -> DensityBlock:
        """Return the layer's part of a density.

        Args:
            value: of some columns, `(..., rows, columns)`.
            means: of `U`'s components, `(K, M_r M_c)`.
            which: these columns; all by default.

        Raises:
            ValueError: no conditional scale, and so no density.
        """
        if self.conditional_scale is None:
            raise ValueError(
                "with max_lambda=0 weights are a function of their inducing weights and have no "
                "density: use closed_form_kl=True, and a zero-mean Normal prior"
            )
        basis = precise(self.column_basis)
        scales = (self._scale() * torch.ones_like(basis[:, 0]))[which]
        u_means = precise(means).unflatten(-1, (self.row_basis.shape[1], -1))
        mean = precise(self.row_basis) @ u_means @ basis[which].mT
        difference = precise(value).unsqueeze(-3) / scales - mean
        both = self.conditional_scale, scales
        return density_block(difference, self.rows, self.columns, which, both)


# --------------------------------------------------------------------------- prior


def isotropic_scale(prior: Any) -> float | None:
    """Return the standard deviation of a zero-mean Normal with the same one everywhere, or None.

    Example:
        >>> isotropic_scale(dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        2.0
        >>> isotropic_scale(dist.Normal(1.0, 2.0).expand([3]).to_event(1)) is None
        True
    """
    normal = prior.base_dist if isinstance(prior, dist.Independent) else prior
    if not isinstance(normal, td.Normal) or normal.loc.requires_grad or normal.scale.requires_grad:
        return None
    known = known_numbers(normal)
    if known is not None:
        return known.scale if known.loc == 0.0 else None
    first = normal.scale.reshape(-1)[:1]
    same = first.numel() and not bool(normal.loc.any()) and bool((normal.scale == first).all())
    return first.item() if same else None


def has_prior_of(q: InducingWeights, p: SiteProduct) -> bool:
    """Say whether the sites' priors are those that the inducing weights are of."""
    expected = q.layer.prior_scales
    found = {name: isotropic_scale(p.priors.get(name)) for name in expected}
    return all(
        scale is not None and math.isclose(scale, expected[name], rel_tol=1e-6)
        for name, scale in found.items()
    )


@td.register_kl(InducingWeights, SiteProduct)
def _kl_inducing_prior(q: InducingWeights, p: SiteProduct) -> Tensor:
    if not has_prior_of(q, p):
        raise NotImplementedError  # left to the densities of the weights
    return q.kl_from_prior()
