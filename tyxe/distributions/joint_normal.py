"""Normals over several sites whose precisions are operators."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions.joint import JointDistribution
from tyxe.distributions.param_blocks import ParamBlocks
from tyxe.linalg import BlockDiagonal, Diagonal, Operator
from tyxe.linalg.checks import SMALL
from tyxe.linalg.sum import invertible, plus
from tyxe.util import in_function_transform

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class _Quadratic(torch.autograd.Function):
    """`x^T A x`, with the product `A x` of the forward pass in its gradient `2 A x`."""

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
    """Return `x^T A x` for vectors `x`, `(..., P)`; its gradient takes no further product."""
    plain = torch.is_grad_enabled() and not in_function_transform()
    if plain and x.requires_grad and not operator.requires_grad:
        value: Tensor = _Quadratic.apply(x, operator)
        return value
    return operator.quadratic(x)


# The determinant of a prior's precision is the same in every step.
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

    A subclass implements `terms`, `precision` and `log_normalizer`. `blocks` say how the sites are
    one vector. The posterior of a Laplace approximation contains a curvature, whose key is
    `absorbed`: where it is the prior of the same net, that curvature is not added again.
    """

    def __init__(self, blocks: ParamBlocks, absorbed: int | None = None) -> None:
        self.blocks, self.absorbed = blocks, absorbed
        super().__init__(tuple(blocks.sites), Size((blocks.size,)))

    @property
    @abstractmethod
    def terms(self) -> list[tuple[Tensor, Operator]]:
        """Pairs `(m, A)` in `log p(w) = log_normalizer - 1/2 sum (w - m)^T A (w - m)`."""

    @property
    @abstractmethod
    def precision(self) -> Operator:
        """The sum of all `A`."""

    @property
    @abstractmethod
    def log_normalizer(self) -> Tensor:
        """The constant of the log-density; 0 if the precision's determinant cannot be computed."""

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        return self.blocks.unflatten(value)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        like = self.terms[0][0]
        return self.blocks.flatten(values).to(like.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of vectors `(..., P)`, in nats."""
        forms = [quadratic(operator, value - loc) for loc, operator in self.terms]
        return self.log_normalizer - torch.stack(forms).sum(0) / 2


class JointNormal(GaussianJoint):
    r"""`N(m, A^-1)` over several sites.

    The precision is any operator of `tyxe.linalg`: `Kronecker` blocks of a Laplace approximation, a
    `Sum` of them, the `Inverse` of a covariance. A density, or a KL from a mean field, needs only
    products with it; draws need its inverse.

    Args:
        blocks: how the sites are one vector.
        loc: `m`, `(P,)`.
        precision: `A`.
        absorbed: key of the curvature that `A` contains, for posteriors of Laplace approximations.

    Raises:
        ValueError: sizes that do not fit.

    Example:
        >>> from tyxe.linalg import Dense
        >>> blocks = ParamBlocks.of_sites({"net.weight": Size([1, 1]), "net.bias": Size([1])})
        >>> q = JointNormal(blocks, torch.zeros(2), Dense(torch.tensor([[2.0, 1.0], [1.0, 1.0]])))
        >>> q.variance.round(), q.marginal("net.bias").variance.round()
        (tensor([1., 2.]), tensor([2.]))
    """

    def __init__(
        self,
        blocks: ParamBlocks,
        loc: Tensor,
        precision: Operator,
        absorbed: int | None = None,
    ) -> None:
        super().__init__(blocks, absorbed)
        for what, size in (("means", loc.numel()), ("rows of precision", precision.size)):
            if size != self.event_shape.numel():
                raise ValueError(
                    f"there are {size} {what} for sites of {self.event_shape.numel()} weights"
                )
        self.loc, self._precision = loc, precision

    @property
    def precision(self) -> Operator:
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
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.precision.inverse_diagonal()

    def rsample(self, sample_shape: Size | tuple[int, ...] = ()) -> Tensor:
        return self.loc + self.precision.sample(tuple(sample_shape))

    def marginal_icdf(self, name: str, value: Tensor) -> Tensor:
        loc, scale = (self.unflatten(tensor)[name] for tensor in (self.loc, self.variance.sqrt()))
        return td.Normal(loc, scale).icdf(value)

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone, from its own dense covariance.

        Raises:
            ValueError: its elements are dependent, and too many for a dense covariance.
        """
        block, which = self._block_of(name)
        loc = self.unflatten(self.loc)[name].flatten()
        flat = value.reshape(*value.shape[: value.dim() - len(self.site_shapes[name])], -1)
        if isinstance(block, Diagonal):
            scale = block.inverse_diagonal()[which].sqrt()
            return td.Normal(loc, scale).log_prob(flat).sum(-1)
        if len(which) * block.size > SMALL**2:
            raise ValueError(
                f"the density of {name!r} alone takes a dense matrix of {len(which):,} x "
                f"{block.size:,}: ask for that of all sites, joint.log_prob(joint.flatten(values))"
            )
        rows = torch.nn.functional.one_hot(which, block.size).to(loc.dtype)
        covariance = block.inverse_quadratic(rows)
        return td.MultivariateNormal(loc, (covariance + covariance.mT) / 2).log_prob(flat)

    def _block_of(self, name: str) -> tuple[Operator, Tensor]:
        """Return the part of the precision that couples a site with others, and its indices."""
        operators = self.precision.blocks if isinstance(self.precision, BlockDiagonal) else {}
        if [operator.size for operator in operators.values()] == self.blocks.sizes:
            for block, operator in zip(self.blocks, operators.values(), strict=True):
                if name in block.sites:
                    indices = torch.arange(block.size, device=self.loc.device)
                    return operator, block.to_values(indices)[name].flatten()
        indices = torch.arange(self.loc.numel(), device=self.loc.device)
        return self.precision, self.unflatten(indices)[name].flatten()


def product_of(factors: Sequence[JointNormal], absorbed: int | None = None) -> GaussianJoint:
    """Return `prod_t N(m_t, A_t^-1)` for Normals over the same blocks.

    With `A = sum A_t` and `m = A^-1 sum A_t m_t` it is `N(m, A^-1)` where the inverse of the sum
    can be computed, as for diagonals, else a `NormalProduct`. A factor may be singular, such as a
    curvature without a prior.

    Raises:
        ValueError: the factors are over different blocks.
    """
    product = NormalProduct(factors, absorbed)
    precision = product.precision
    if not invertible(precision):
        return product
    pulls = [factor.precision.matmul(factor.loc) for factor in factors]
    mean = precision.solve(torch.stack(pulls).sum(0))
    return JointNormal(product.blocks, mean, precision, absorbed)


class NormalProduct(GaussianJoint):
    """A product of Normals over the same blocks, where the sum of precisions has no known inverse.

    It is used as a penalty [T eq. 3.71]: its density is known up to a factor, draws and moments are
    not. `absorbed` is that of `GaussianJoint`.

    Raises:
        ValueError: the factors are over different blocks.
    """

    def __init__(self, factors: Sequence[JointNormal], absorbed: int | None = None) -> None:
        self.factors = list(factors)
        super().__init__(self.factors[0].blocks, absorbed)
        for factor in self.factors:
            if factor.blocks != self.blocks:
                raise ValueError(
                    f"a product of Normals is over the same sites in the same order; got "
                    f"{', '.join(self.names)} and {', '.join(factor.names)}"
                )

    @property
    def terms(self) -> list[tuple[Tensor, Operator]]:
        return [(factor.loc, factor.precision) for factor in self.factors]

    @property
    def precision(self) -> Operator:
        first, *others = (factor.precision for factor in self.factors)
        for other in others:
            first = plus(first, other)
        return first

    @property
    def log_normalizer(self) -> Tensor:
        return self.factors[0].loc.new_zeros(())

    def _no_moments(self) -> ValueError:
        return ValueError(
            f"a product of {len(self.factors)} Normals with structured precisions has neither "
            'moments nor draws: it is a penalty. Keep one Normal with accumulate="average"'
        )

    def rsample(self, sample_shape: Size | tuple[int, ...] = ()) -> Tensor:
        raise self._no_moments()

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        raise self._no_moments()
