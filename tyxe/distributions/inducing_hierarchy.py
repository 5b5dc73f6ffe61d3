"""Layers whose inducing weights have inducing weights themselves, in one matrix [T 4.2.2.3]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions.inducing import InducingWeights, has_prior_of
from tyxe.distributions.inducing_density import mixture_log_density
from tyxe.distributions.inducing_u import InducingU, SampleShape
from tyxe.distributions.joint import IndependentSites, JointDistribution


def _stack_components(stack: InducingWeights) -> tuple[Tensor, Tensor]:
    """Return means `(K, n)` and covariance of all elements of a stack, row by row."""
    means, covariance = stack.u.components()
    basis = torch.kron(stack.row_basis, stack.column_basis)
    total = basis @ covariance @ basis.mT
    if stack.conditional_scale is not None:
        identity = torch.eye(len(basis), dtype=basis.dtype, device=basis.device)
        total = total + stack.conditional_scale.square() * (identity - basis @ basis.mT)
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
    """The weights of all layers, whose whitened inducing weights are the weights of a stack.

    The stacked `U_1, ..., U_L` have one global matrix `G ~ q(G)` as their inducing weights, and the
    prior `N(0, 1)`: `KL = sum_l R(lambda_l) + R(lambda_G) + KL[q(G) || p(G)]`. Each layer has a
    `StackedU` of the stack, in its order.

    Reference:
        [T] 4.2.2.3.
    """

    def __init__(self, layers: Sequence[InducingWeights], stack: InducingWeights) -> None:
        self.layers, self.stack = list(layers), stack
        names = tuple(name for layer in layers for name in layer.names)
        super().__init__(names, Size((sum(layer.event_shape.numel() for layer in layers),)))

    def _cat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten(-2) for part in parts], -1)

    def _matrices(self, value: Tensor) -> list[Tensor]:
        parts = value.split([layer.event_shape.numel() for layer in self.layers], -1)
        return [
            part.unflatten(-1, layer.event_shape)
            for part, layer in zip(parts, self.layers, strict=True)
        ]

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        parts = zip(self.layers, self._matrices(value), strict=True)
        return {n: v for layer, part in parts for n, v in layer.unflatten(part).items()}

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._cat([layer.flatten(values) for layer in self.layers])

    @property
    def mean(self) -> Tensor:
        return self._cat([layer.mean for layer in self.layers])

    @property
    def variance(self) -> Tensor:
        return self._cat([layer.variance for layer in self.layers])

    def _rows(self) -> list[int]:
        return [layer.u.event_shape[0] for layer in self.layers]

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        parts = self.stack.rsample(sample_shape).split(self._rows(), -2)
        drawn = [layer.sample_given(u) for layer, u in zip(self.layers, parts, strict=True)]
        return self._cat(drawn)

    def kl_from_prior(self) -> Tensor:
        """Return the KL over weights and all inducing weights, in nats."""
        conditional = torch.stack([layer.conditional_kl() for layer in self.layers]).sum()
        return conditional + self.stack.kl_from_prior()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density, in time cubic in the number of all inducing weights."""
        means, covariance = _stack_components(self.stack)
        own = means.split([layer.u.event_shape.numel() for layer in self.layers], -1)
        parts = zip(self.layers, self._matrices(value), own, strict=True)
        blocks = [q.density_block(v, m) for q, v, m in parts]
        return mixture_log_density(blocks, covariance).to(value.dtype)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        layer = next(layer for layer in self.layers if name in layer.names)
        return layer.marginal_log_prob(name, value)


@td.register_kl(HierarchicalInducing, IndependentSites)
def _kl_hierarchy_prior(q: HierarchicalInducing, p: IndependentSites) -> Tensor:
    if not all(has_prior_of(layer, p) for layer in q.layers):
        raise NotImplementedError
    return q.kl_from_prior()
