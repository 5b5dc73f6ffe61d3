"""Weights of layers given few inducing weights [T 4.2], which may have some themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from tyxe.distributions.inducing_formulas import (
    DensityBlock,
    Side,
    conditional_divergence,
    identity,
    matheron,
    mixture_log_density,
)
from tyxe.distributions.joint import IndependentSites, JointDistribution
from tyxe.distributions.normal import as_gaussian
from tyxe.distributions.normal_kl import known_numbers
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.util import precise

SampleShape = Size | list[int] | tuple[int, ...]


class InducingU(td.Distribution, ABC):
    """A distribution over matrices `U` of inducing weights, `(M_r, M_c)`, flattened row by row."""

    arg_constraints = {}  # noqa: RUF012  (torch's own declaration)
    has_rsample = True

    def __init__(self, shape: Size) -> None:
        super().__init__(Size(), shape, validate_args=False)

    @abstractmethod
    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """Return elementwise variances of `rows U columns^T`; None is the identity."""

    @abstractmethod
    def half_logdet(self) -> Tensor | None:
        """Return half the log-determinant of the covariance `S`, or None without a density."""

    @abstractmethod
    def components(self) -> tuple[Tensor, Tensor]:
        """Return means `(K, M_r M_c)` of the equally likely Gaussians, and their covariance."""

    def kl(self) -> Tensor:
        """Return `1/2 (E |U|^2 - M_r M_c - log|S|)`, the KL from `N(0, 1)`; 0 without a density."""
        mean, half_logdet = self.mean, self.half_logdet()
        if half_logdet is None:
            return mean.new_zeros(())
        square = mean.square().sum() + self.variance_through().sum()
        return (square - mean.numel()) / 2 - half_logdet


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
        >>> from tyxe.guides.inducing_families import DiagonalU
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
        scale = self._scale()
        ones = self.row_basis.new_ones(self.layer.shape)
        return self.variance_of(self.row_basis, self.column_basis, ones) * (scale * scale)

    def variance_of(self, left: Tensor, right: Tensor, total: Tensor) -> Tensor:
        """Return variances for `s = 1` of linear maps of the weights.

        Args:
            left: the map of the rows times `B_r`.
            right: the map of the columns times `B_c`.
            total: the variances under the prior.
        """
        variance = self.u.variance_through(left, right)
        if self.conditional_scale is None:
            return variance
        explained = torch.outer(left.square().sum(1), right.square().sum(1))
        return variance + self.conditional_scale.square() * (total - explained)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return self.sample_given(self.u.rsample(sample_shape))

    def sample_given(self, u: Tensor) -> Tensor:
        """Draw `W` for a draw of the whitened inducing weights, `(..., M_r, M_c)`."""
        scale, right = self._scale(), self.column_basis.mT
        if self.conditional_scale is None:
            return self.row_basis @ u @ right * scale
        batch, (d_r, d_c) = u.shape[:-2], self.layer.shape
        shapes = (d_r, d_c), (d_r, u.shape[-1]), u.shape[-2:]
        noise = [self.conditional_scale * u.new_empty((*batch, *s)).normal_() for s in shapes]
        left = matheron(self.rows, self.columns, u, noise)
        if isinstance(scale, float) and not batch:  # the most frequent case, in one pass
            return torch.addmm(noise[0], left, right, beta=scale, alpha=scale)
        return (noise[0] + left @ right) * scale

    def conditional_kl(self) -> Tensor:
        """Return the weighted `R(lambda)`, in nats."""
        if self.conditional_scale is None:
            return self.row_basis.new_zeros(())
        count = math.prod(self.layer.shape)
        return self.weight * conditional_divergence(self.conditional_scale, count)

    def kl_from_prior(self) -> Tensor:
        """Return `R(lambda) + KL[q(U) || p(U)]`, in nats."""
        return self.conditional_kl() + self.u.kl()

    def has_priors(self, p: IndependentSites) -> bool:
        """Whether the sites have the priors that this was built for."""

        def has(name: str, expected: float) -> bool:
            prior: Any = p.distributions.get(name)
            scale = isotropic_scale(prior)
            # The prior may have been moved to another dtype, which rounds its scale.
            return (
                scale is not None
                and scale == torch.tensor(expected, dtype=prior.mean.dtype, device="cpu").item()
            )

        return all(map(has, self.names, self.layer.scales))

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
        b_r, h_r, b_c, h_c, scale, means = map(
            precise, (*self.rows[:2], *self.columns[:2], self.conditional_scale, means)
        )
        scales = (self._scale() * torch.ones_like(b_c[:, 0]))[which]
        own, others = b_c[which], b_c.clone()
        others[which] = 0.0
        mean = b_r @ means.unflatten(-1, (b_r.shape[1], -1)) @ own.mT
        deviation = (precise(value).unsqueeze(-3) / scales - mean) / scale
        row_gram, one = b_r.mT @ b_r, identity(len(h_c), h_c)
        # I - B^T B = (I - B_r^T B_r) x I + B_r^T B_r x (I - B_o^T B_o), with B_o of these columns.
        unexplained = torch.kron(h_r @ h_r.mT, one) + torch.kron(
            row_gram, h_c @ h_c.mT + others.mT @ others
        )
        log_scale = (scale * scales).log().sum() + len(own) * math.log(2 * math.pi) / 2
        return DensityBlock(
            deviation.square().sum((-1, -2)),
            (b_r.mT @ deviation @ own).flatten(-2),
            torch.kron(row_gram, own.mT @ own),
            unexplained,
            scale,
            len(b_r) * log_scale,
        )


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


# --------------------------------------------------------------------------- stacks [T 4.2.2.3]


def _stack_components(stack: InducingWeights) -> tuple[Tensor, Tensor]:
    """Return means `(K, n)` and covariance of all elements of a stack, row by row."""
    means, covariance = stack.u.components()
    basis = torch.kron(stack.row_basis, stack.column_basis)
    total = basis @ covariance @ basis.mT
    if stack.conditional_scale is not None:
        unexplained = identity(len(basis), basis) - basis @ basis.mT
        total = total + stack.conditional_scale.square() * unexplained
    return means @ basis.mT, total


class StackedU(InducingU):
    """One layer's whitened inducing weights: the rows from `start` to `stop` of a stack."""

    def __init__(self, stack: InducingWeights, start: int, stop: int) -> None:
        self.stack, self.start, self.stop = stack, start, stop
        super().__init__(Size((stop - start, stack.layer.shape[1])))

    @property
    def mean(self) -> Tensor:
        return self.stack.mean[self.start : self.stop]

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return self.stack.rsample(sample_shape)[..., self.start : self.stop, :]

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        own, basis = self.stack.row_basis[self.start : self.stop], self.stack.column_basis
        rows = identity(len(own), own) if rows is None else rows
        columns = identity(len(basis), basis) if columns is None else columns
        total = torch.outer(rows.square().sum(1), columns.square().sum(1))
        return self.stack.variance_of(rows @ own, columns @ basis, total)

    def half_logdet(self) -> Tensor:
        raise NotImplementedError("the rows of a stack have one KL together: that of the stack")

    def components(self) -> tuple[Tensor, Tensor]:
        means, covariance = _stack_components(self.stack)
        own = slice(*(row * self.stack.layer.shape[1] for row in (self.start, self.stop)))
        return means[:, own], covariance[own, own]


class HierarchicalInducing(JointDistribution):
    """The weights of all layers, whose whitened inducing weights are the weights of a stack.

    The stacked `U_1, ..., U_L` have one global matrix `G ~ q(G)` as their inducing weights, and the
    prior `N(0, 1)`: `KL = sum_l R(lambda_l) + R(lambda_G) + KL[q(G) || p(G)]`. Each layer has a
    `StackedU` of the stack, in its order.
    """

    def __init__(self, layers: Sequence[InducingWeights], stack: InducingWeights) -> None:
        self.layers, self.stack = list(layers), stack
        names = tuple(name for layer in layers for name in layer.names)
        super().__init__(names, Size((sum(layer.event_shape.numel() for layer in layers),)))

    def _cat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def _split(self, value: Tensor) -> Iterator[tuple[InducingWeights, Tensor]]:
        """Yield each layer with its matrix."""
        parts = value.split([layer.event_shape.numel() for layer in self.layers], -1)
        for layer, part in zip(self.layers, parts, strict=True):
            yield layer, part.unflatten(-1, layer.event_shape)

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        parts = self._split(value)
        return {n: v for layer, part in parts for n, v in layer.unflatten(part).items()}

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._cat(layer.flatten(values) for layer in self.layers)

    @property
    def mean(self) -> Tensor:
        return self._cat(layer.mean for layer in self.layers)

    @property
    def variance(self) -> Tensor:
        return self._cat(layer.variance for layer in self.layers)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        rows = [layer.u.event_shape[0] for layer in self.layers]
        parts = zip(self.layers, self.stack.rsample(sample_shape).split(rows, -2), strict=True)
        return self._cat(layer.sample_given(u) for layer, u in parts)

    def kl_from_prior(self) -> Tensor:
        """Return the KL over weights and all inducing weights, in nats."""
        conditional = torch.stack([layer.conditional_kl() for layer in self.layers]).sum()
        return conditional + self.stack.kl_from_prior()

    def has_priors(self, p: IndependentSites) -> bool:
        """Whether the sites have the priors that this was built for."""
        return all(layer.has_priors(p) for layer in self.layers)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, in time cubic in the number of all inducing weights."""
        means, covariance = _stack_components(self.stack)
        own = means.split([layer.u.event_shape.numel() for layer in self.layers], -1)
        parts = zip(self._split(value), own, strict=True)
        blocks = [layer.density_block(part, m) for (layer, part), m in parts]
        return mixture_log_density(blocks, covariance).to(value.dtype)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        layer = next(layer for layer in self.layers if name in layer.names)
        return layer.marginal_log_prob(name, value)


@td.register_kl(InducingWeights, IndependentSites)
@td.register_kl(HierarchicalInducing, IndependentSites)
def _kl_from_priors(q: InducingWeights | HierarchicalInducing, p: IndependentSites) -> Tensor:
    if not q.has_priors(p):
        raise NotImplementedError  # the KL is then estimated from densities of the weights
    return q.kl_from_prior()
