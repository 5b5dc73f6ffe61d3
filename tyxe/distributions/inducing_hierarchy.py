"""Inducing weights of all layers, given those of one matrix above them [T 4.2.2.3]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions.inducing import InducingWeights, has_prior_of
from tyxe.distributions.inducing_density import mixture_log_density
from tyxe.distributions.inducing_u import InducingU, SampleShape
from tyxe.distributions.joint import JointDistribution, SiteProduct

__all__ = ["HierarchicalInducing", "StackedU"]


def _stack_components(stack: InducingWeights) -> tuple[Tensor, Tensor]:
    """Means `(K, n)` and covariance of all elements of a stack, row by row."""
    means, covariance = stack.u.components()
    basis = torch.kron(stack.row_basis, stack.column_basis)
    total = basis @ covariance @ basis.mT
    if stack.conditional_scale is not None:
        identity = torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
        total = total + stack.conditional_scale.square() * (identity - basis @ basis.mT)
    return means @ basis.mT, total


class StackedU(InducingU):
    """Some rows of a stack of whitened inducing weights: one layer's.

    Args:
        stack: the distribution of all rows.
        start: the first row.
        stop: the row after the last.
    """

    def __init__(self, stack: InducingWeights, start: int, stop: int) -> None:
        self.stack, self.start, self.stop = stack, start, stop
        super().__init__(Size((stop - start, stack.layer.shape[1])))

    @property
    def mean(self) -> Tensor:
        return self.stack.mean[self.start : self.stop]

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return self.stack.rsample(sample_shape)[..., self.start : self.stop, :]

    def variance_through(self, rows: Tensor | None, columns: Tensor | None) -> Tensor:
        row_basis = self.stack.row_basis[self.start : self.stop]
        column_basis = self.stack.column_basis
        if rows is None:
            rows = torch.eye(len(row_basis)).to(row_basis)
        if columns is None:
            columns = torch.eye(len(column_basis)).to(column_basis)
        left, right = rows @ row_basis, columns @ column_basis
        variance = self.stack.u.variance_through(left, right)
        if self.stack.conditional_scale is None:
            return variance
        total = torch.outer(rows.square().sum(1), columns.square().sum(1))
        explained = torch.outer(left.square().sum(1), right.square().sum(1))
        return variance + self.stack.conditional_scale.square() * (total - explained)

    def kl(self, row_tril: Tensor | None, column_tril: Tensor | None) -> Tensor:
        raise NotImplementedError("the rows of a stack have one KL together: that of the stack")

    def components(self) -> tuple[Tensor, Tensor]:
        means, covariance = _stack_components(self.stack)
        own = slice(*(row * self.stack.layer.shape[1] for row in (self.start, self.stop)))
        return means[:, own], covariance[own, own]


class HierarchicalInducing(JointDistribution):
    r"""The weights of all layers, whose whitened inducing weights are weights of a stack.

    `U_1, ..., U_L`, one upon the other, have inducing weights of their own, one global matrix
    `G ~ q(G)`: `KL = sum_l R(lambda_l) + R(lambda_G) + KL[q(G) || p(G)]`.

    Args:
        layers: each with a `StackedU` of the stack, in its order.
        stack: the distribution of `U_1, ..., U_L` given `G`; its prior is `N(0, 1)`.

    Reference:
        [T] 4.2.2.3.
    """

    def __init__(self, layers: Sequence[InducingWeights], stack: InducingWeights) -> None:
        self.layers, self.stack = list(layers), stack
        names = tuple(name for layer in layers for name in layer.names)
        super().__init__(names, Size((sum(layer.event_shape.numel() for layer in layers),)))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def _matrices(self, value: Tensor) -> list[Tensor]:
        parts = value.split([layer.event_shape.numel() for layer in self.layers], -1)
        return [
            part.unflatten(-1, layer.event_shape)
            for part, layer in zip(parts, self.layers, strict=True)
        ]

    def separate(self, value: Tensor) -> dict[str, Tensor]:
        parts = zip(self.layers, self._matrices(value), strict=True)
        return {n: v for layer, part in parts for n, v in layer.separate(part).items()}

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._joined([layer.join(values) for layer in self.layers])

    @property
    def mean(self) -> Tensor:
        """Elementwise mean."""
        return self._joined([layer.mean for layer in self.layers])

    @property
    def variance(self) -> Tensor:
        """Elementwise variance."""
        return self._joined([layer.variance for layer in self.layers])

    def _rows(self) -> list[int]:
        return [layer.u.event_shape[0] for layer in self.layers]

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        """Draw `G`, the stack, and every layer, with gradients."""
        parts = self.stack.rsample(sample_shape).split(self._rows(), -2)
        drawn = [layer.sample_given(u) for layer, u in zip(self.layers, parts, strict=True)]
        return self._joined(drawn)

    def kl_from_prior(self) -> Tensor:
        """Return the KL over weights and all inducing weights, in nats."""
        conditional = torch.stack([layer.conditional_kl() for layer in self.layers]).sum()
        return conditional + self.stack.kl_from_prior()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density; costs the cube of the number of all inducing weights."""
        means, covariance = _stack_components(self.stack)
        own = means.split([layer.u.event_shape.numel() for layer in self.layers], -1)
        parts = zip(self.layers, self._matrices(value), own, strict=True)
        blocks = [q.density_block(v, m) for q, v, m in parts]
        return mixture_log_density(blocks, covariance).to(value.dtype)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        layer = next(layer for layer in self.layers if name in layer.names)
        return layer.marginal_log_prob(name, value)


@td.register_kl(HierarchicalInducing, SiteProduct)
def _kl_hierarchy_prior(q: HierarchicalInducing, p: SiteProduct) -> Tensor:
    if not all(has_prior_of(layer, p) for layer in q.layers):
        raise NotImplementedError
    return q.kl_from_prior()
