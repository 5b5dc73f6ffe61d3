"""A Normal over several sites, known by the operator that is its precision."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions.functorch import in_function_transform
from tyxe.distributions.groups import Group, joined, separated
from tyxe.distributions.joint import JointDistribution
from tyxe.linalg import SMALL, BlockDiagonal, Diagonal, Operator, invertible

__all__ = ["GaussianJoint", "JointNormal", "quadratic"]

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class _Quadratic(torch.autograd.Function):
    """`x^T A x` with the gradient `2 A x` of the product that it takes anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: Operator) -> Tensor:
        product = operator.matmul(x)
        ctx.operator = operator
        ctx.save_for_backward(x, product)
        return (x * product).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        x, product = ctx.saved_tensors
        if torch.is_grad_enabled():
            product = ctx.operator.matmul(x)  # for a second derivative
        return 2 * grad.unsqueeze(-1) * product, None


def quadratic(operator: Operator, x: Tensor) -> Tensor:
    """Return `x^T A x`, `(...)`, differentiable in `x` at no further cost.

    Args:
        operator: `A`; a constant where only `x` has a gradient.
        x: vectors `(..., P)`.

    Example:
        >>> quadratic(Diagonal(torch.tensor([1.0, 2.0])), torch.ones(2))
        tensor(3.)
    """
    plain = torch.is_grad_enabled() and not in_function_transform()
    if plain and x.requires_grad and not operator.requires_grad:
        value: Tensor = _Quadratic.apply(x, operator)
        return value
    return operator.quadratic(x)


# A prior's does not change from step to step.
_LOGDETS: weakref.WeakKeyDictionary[Operator, Tensor] = weakref.WeakKeyDictionary()


def _logdet(operator: Operator) -> Tensor:
    if operator.requires_grad:
        return operator.logdet()
    if operator not in _LOGDETS:
        with torch.no_grad():
            _LOGDETS[operator] = operator.logdet()
    return _LOGDETS[operator]


class GaussianJoint(JointDistribution, ABC):
    """Base of distributions over several sites whose log-density is quadratic.

    Args:
        groups: of the sites, in the order of the vector.

    A subclass gives `terms`, `precision` and `log_normalizer`.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        names = tuple(site for group in self.groups for site in group.sites)
        super().__init__(names, Size((sum(group.size for group in self.groups),)))

    @property
    @abstractmethod
    def terms(self) -> list[tuple[Tensor, Operator]]:
        """Pairs `(m, A)`: minus twice the log-density is `sum (w - m)^T A (w - m)`, and a rest."""

    @property
    @abstractmethod
    def precision(self) -> Operator:
        """The sum of all `A`."""

    @property
    @abstractmethod
    def log_normalizer(self) -> Tensor:
        """What the log-density adds to the terms; 0 where no determinant is known at this size."""

    def separate(self, value: Tensor) -> dict[str, Tensor]:
        return separated(self.groups, value)

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        like = self.terms[0][0]
        return joined(self.groups, values).to(like.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of vectors `(..., P)`."""
        forms = [quadratic(operator, value - loc) for loc, operator in self.terms]
        return self.log_normalizer - torch.stack(forms).sum(0) / 2


class JointNormal(GaussianJoint):
    r"""`N(m, A^-1)` over several sites.

    The precision is any operator of `tyxe.linalg`: `Kronecker` blocks of a Laplace approximation, a
    `Sum` of them, the `Inverse` of a covariance. Products with it are all that a density or a KL
    from a mean field takes; draws take its inverse.

    Args:
        groups: of the sites, in the order of the vector.
        loc: `m`, `(P,)`.
        precision: `A`.

    Raises:
        ValueError: sizes that do not fit.

    Example:
        >>> from tyxe.distributions import PlainGroup
        >>> from tyxe.linalg import Dense
        >>> groups = [PlainGroup("net.weight", Size([1, 1])), PlainGroup("net.bias", Size([1]))]
        >>> q = JointNormal(groups, torch.zeros(2), Dense(torch.tensor([[2.0, 1.0], [1.0, 1.0]])))
        >>> q.variance.round(), q.marginal("net.bias").variance.round()
        (tensor([1., 2.]), tensor([2.]))
    """

    def __init__(self, groups: Sequence[Group], loc: Tensor, precision: Operator) -> None:
        super().__init__(groups)
        for what, size in (("means", loc.numel()), ("rows of precision", precision.size)):
            if size != self.event_shape.numel():
                raise ValueError(
                    f"there are {size} {what} for sites of {self.event_shape.numel()} weights"
                )
        self.loc, self._precision = loc, precision

    @property
    def precision(self) -> Operator:
        """`A`."""
        return self._precision

    @property
    def terms(self) -> list[tuple[Tensor, Operator]]:
        return [(self.loc, self.precision)]

    @property
    def log_normalizer(self) -> Tensor:
        if not invertible(self.precision):
            return self.loc.new_zeros(())
        return _logdet(self.precision) / 2 - self.loc.numel() * LOG_SQRT_2PI

    @property
    def mean(self) -> Tensor:
        """Elementwise mean."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Elementwise variance."""
        return self.precision.inverse_diagonal()

    def rsample(self, sample_shape: Size | tuple[int, ...] = ()) -> Tensor:
        """Draw vectors with gradients."""
        return self.loc + self.precision.sample(tuple(sample_shape))

    def marginal_icdf(self, name: str, value: Tensor) -> Tensor:
        loc, scale = (self.separate(tensor)[name] for tensor in (self.loc, self.variance.sqrt()))
        return td.Normal(loc, scale).icdf(value)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone, by its own dense covariance.

        Raises:
            ValueError: it has more than some thousands of weights, and they are not independent.
        """
        block, which = self._block_of(name)
        loc = self.separate(self.loc)[name].flatten()
        flat = value.reshape(*value.shape[: value.dim() - len(self.site_shapes[name])], -1)
        if isinstance(block, Diagonal):
            scale = block.inverse_diagonal()[which].sqrt()
            return td.Normal(loc, scale).log_prob(flat).sum(-1)
        if len(which) * block.size > SMALL**2:
            raise ValueError(
                f"the density of {name!r} alone takes a dense matrix of {len(which):,} x "
                f"{block.size:,}: ask for that of all sites, joint.log_prob(joint.join(values))"
            )
        rows = torch.nn.functional.one_hot(which, block.size).to(loc.dtype)
        covariance = block.inverse_quadratic(rows)
        return td.MultivariateNormal(loc, (covariance + covariance.mT) / 2).log_prob(flat)

    def _block_of(self, name: str) -> tuple[Operator, Tensor]:
        """The part of the precision that couples a site with others, and where the site is."""
        group = next(group for group in self.groups if name in group.sites)
        sizes = [group.size for group in self.groups]
        blocks = self.precision.blocks if isinstance(self.precision, BlockDiagonal) else {}
        if [block.size for block in blocks.values()] == sizes:
            block = list(blocks.values())[self.groups.index(group)]
            indices = torch.arange(group.size, device=self.loc.device)
            return block, group.to_values(indices)[name].flatten()
        indices = torch.arange(self.loc.numel(), device=self.loc.device)
        return self.precision, self.separate(indices)[name].flatten()
