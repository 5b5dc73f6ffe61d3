"""A product of Normals over the same sites, about centres of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor

from tyxe.distributions.joint_normal import GaussianJoint, JointNormal
from tyxe.linalg import Operator, invertible, plus

__all__ = ["NormalProduct", "product_of"]


def product_of(factors: Sequence[JointNormal]) -> GaussianJoint:
    """Return `prod_t N(m_t, A_t^-1)`: one Normal where its mean can be had, else a `NormalProduct`.

    `A = sum A_t`, `m = A^-1 sum A_t m_t`: of diagonals, as of any sum that has an inverse, it is
    one Normal again. A factor may be singular: a curvature alone.

    Args:
        factors: Normals over the same groups.

    Raises:
        ValueError: they are over others.

    Example:
        >>> from tyxe.distributions import PlainGroup
        >>> from tyxe.linalg import Diagonal
        >>> groups = [PlainGroup("w", Size([1]))]
        >>> one = JointNormal(groups, torch.zeros(1), Diagonal(torch.tensor([1.0])))
        >>> three = JointNormal(groups, torch.ones(1), Diagonal(torch.tensor([3.0])))
        >>> product_of([one, three]).mean
        tensor([0.7500])
    """
    product = NormalProduct(factors)
    precision = product.precision
    if not invertible(precision):
        return product
    pulls = [factor.precision.matmul(factor.loc) for factor in factors]
    return JointNormal(product.groups, precision.solve(torch.stack(pulls).sum(0)), precision)


class NormalProduct(GaussianJoint):
    """The product of Normals whose precisions have a sum without an inverse: a penalty [T 3.71].

    It has a density up to a factor, and neither draws nor moments.

    Args:
        factors: Normals over the same groups.

    Raises:
        ValueError: they are over others.

    Reference:
        [T] eq. 3.71.
    """

    def __init__(self, factors: Sequence[JointNormal]) -> None:
        self.factors = list(factors)
        super().__init__(self.factors[0].groups)
        for factor in self.factors:
            if factor.groups != self.groups:
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
        """Raise: there is no root of the precision."""
        raise self._no_moments()

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Raise: the others cannot be integrated out."""
        raise self._no_moments()
