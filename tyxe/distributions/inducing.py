"""Weights of a layer given few inducing weights [T 4.2]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from tyxe.distributions.inducing_density import DensityBlock, density_block, mixture_log_density
from tyxe.distributions.inducing_formulas import Side, conditional_divergence, matheron
from tyxe.distributions.inducing_u import InducingU, SampleShape
from tyxe.distributions.joint import IndependentSites, JointDistribution
from tyxe.distributions.normal import as_gaussian
from tyxe.distributions.normal_kl import known_numbers
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.util import precise


@dataclass(frozen=True)
class LayerPrior:
    """`N(0, s^2)` over a layer's matrix, with one `s` in `scales` for each of the block's sites.

    The block has the flattened weight, and the bias as its last column.
    """

    block: LinearBlock
    scales: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.block.outputs, self.block.columns

    def scale_of_columns(self, like: Tensor) -> float | Tensor:
        """Return `s` by column, or one number if all are equal."""
        if len(set(self.scales)) == 1:
            return self.scales[0]
        weight, bias = self.scales
        return torch.cat([like.new_full((self.block.fan_in,), weight), like.new_full((1,), bias)])


class InducingWeights(JointDistribution):
    r"""A layer's weights given inducing weights `U ~ q(U)`, whose prior is `N(0, s^2)`.

    `q(W|U) = N(s Z_r^T Psi_r^-1 U Psi_c^-1 Z_c, lambda^2 Cov[W|U])` [T 4.28, C.2], drawn by the
    extended Matheron rule [T 4.31]. Its factors are computed beforehand, so that draws need no
    Cholesky. Its KL from the prior is that over `W` and `U` together, `R(lambda) + KL[q(U) ||
    p(U)]`, an upper bound of that over `W`; densities are those of `W`, with `U` integrated out.

    Args:
        u: the distribution of the whitened `U_w = C_r^-1 U C_c^-T`, `(M_r, M_c)`.
        rows: factors of the rows, from `inducing_side`.
        columns: factors of the columns, from `inducing_side`.
        conditional_scale: `lambda`; None makes `W` a function of `U`, and leaves `R` out.
        layer: the layer's sites and their prior scales `s`.
        weight: of `R` in the KL; less than 1 in the function-space form [T 4.40].

    Reference:
        [T] 4.2 and appendix C.

    Example:
        >>> from tyxe.distributions.inducing_formulas import inducing_side
        >>> from tyxe.distributions.inducing_u import DiagonalU
        >>> side = inducing_side(torch.ones(1, 2), torch.zeros(1))
        >>> u = DiagonalU(torch.zeros(1, 1), torch.zeros(1, 1))
        >>> layer = LayerPrior(LinearBlock("net.weight", None, Size([2, 2])), (3.0,))
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
        layer: LayerPrior,
        weight: float = 1.0,
    ) -> None:
        self.u, self.layer, self.weight = u, layer, weight
        # One by one, because `BufferedDistribution` does not look into named tuples.
        self.row_basis, self.row_residual, self.row_tril = rows
        self.column_basis, self.column_residual, self.column_tril = columns
        self.conditional_scale = conditional_scale
        super().__init__(tuple(layer.block.sites), Size(layer.shape))

    @property
    def rows(self) -> Side:
        """The factors of the rows."""
        return Side(self.row_basis, self.row_residual, self.row_tril)

    @property
    def columns(self) -> Side:
        """The factors of the columns."""
        return Side(self.column_basis, self.column_residual, self.column_tril)

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        return self.layer.block.to_values(value.flatten(-2))

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.layer.block.to_vector(values).view(self.layer.shape)

    def _scale(self) -> float | Tensor:
        return self.layer.scale_of_columns(self.row_basis)

    @property
    def mean(self) -> Tensor:
        return self.row_basis @ self.u.mean @ self.column_basis.mT * self._scale()

    @property
    def variance(self) -> Tensor:
        variance = self.u.variance_through(self.row_basis, self.column_basis)
        if self.conditional_scale is not None:
            explained = torch.outer(
                self.row_basis.square().sum(1), self.column_basis.square().sum(1)
            )
            variance = variance + self.conditional_scale.square() * (1 - explained)
        scale = self._scale()
        return variance * (scale * scale)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
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
        if isinstance(scale, float) and not batch:  # the most frequent case, in one pass
            right = self.column_basis.mT
            return torch.addmm(noise[0], left, right, beta=scale, alpha=scale)
        return (noise[0] + left @ self.column_basis.mT) * scale

    def conditional_kl(self) -> Tensor:
        """Return the weighted `R(lambda)`, in nats."""
        if self.conditional_scale is None:
            return self.row_basis.new_zeros(())
        count = math.prod(self.layer.shape)
        return self.weight * conditional_divergence(self.conditional_scale, count)

    def kl_from_prior(self) -> Tensor:
        """Return `R(lambda) + KL[q(U) || p(U)]`, in nats."""
        return self.conditional_kl() + self.u.kl(None, None)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of the matrix, in time cubic in `M_r M_c`."""
        means, covariance = self.u.components()
        return mixture_log_density([self.density_block(value, means)], covariance).to(value.dtype)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        means, covariance = self.u.components()
        batch = value.shape[: value.dim() - len(self.site_shapes[name])]
        matrix = value.reshape(*batch, self.layer.shape[0], -1)
        part = self.density_block(matrix, means, self.layer.block.columns_of(name))
        return mixture_log_density([part], covariance).to(value.dtype)

    def density_block(
        self, value: Tensor, means: Tensor, which: slice = slice(None)
    ) -> DensityBlock:
        """Return the layer's part of a density.

        Args:
            value: values of the columns `which`, `(..., rows, columns)`.
            means: of `U`'s components, `(K, M_r M_c)`.
            which: these columns; all by default.

        Raises:
            ValueError: there is no conditional scale, and so no density.
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


def isotropic_scale(prior: Any) -> float | None:
    """Return the standard deviation that a zero-mean Normal has everywhere, or None."""
    normal = as_gaussian(prior)
    if normal is None or normal.loc.requires_grad or normal.scale.requires_grad:
        return None
    with disable_proxy_modes_tracing():  # the numbers only decide which formula is the right one
        known = known_numbers(normal)
        if known is not None:
            return known.scale if known.loc == 0.0 else None
        first = normal.scale.reshape(-1)[:1]
        same = first.numel() and not bool(normal.loc.any()) and bool((normal.scale == first).all())
        return first.item() if same else None


def has_prior_of(q: InducingWeights, p: IndependentSites) -> bool:
    """Whether the sites have the priors that `q` was built for."""

    def has(name: str, expected: float) -> bool:
        prior: Any = p.distributions.get(name)
        scale = isotropic_scale(prior)
        # The prior may have been moved to another dtype, which rounds its scale.
        return scale is not None and scale == torch.tensor(expected, dtype=prior.mean.dtype).item()

    return all(has(name, scale) for name, scale in zip(q.names, q.layer.scales, strict=True))


@td.register_kl(InducingWeights, IndependentSites)
def _kl_inducing_prior(q: InducingWeights, p: IndependentSites) -> Tensor:
    if not has_prior_of(q, p):
        raise NotImplementedError  # the KL is then estimated from densities of the weights
    return q.kl_from_prior()
