"""Gaussians over several sites whose precisions are operators."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe import check
from tyxe.distributions.joint import IndependentSites, JointDistribution
from tyxe.distributions.normal import FactorizedNormal, as_gaussian
from tyxe.distributions.param_blocks import ParamBlocks
from tyxe.files import as_state, of_state
from tyxe.linalg import BlockDiagonal, Diagonal, Operator
from tyxe.linalg.checks import SMALL
from tyxe.linalg.functions import invertible, is_diagonal, permuted, plus, trace_of_solve
from tyxe.util import at_least_float32, in_function_transform

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
        return _Quadratic.apply(x, operator)
    return operator.quadratic(x)


# A factor of a Gaussian: its mean `(P,)` and its precision.
Term = tuple[Tensor, Operator]


class Gaussian(JointDistribution):
    r"""`N(m, A^-1)` over several sites, or a product of such factors.

    The precision is any operator of `tyxe.linalg`: `Kronecker` blocks of a Laplace approximation, a
    `Sum` of them, the `Inverse` of a covariance. A density, or a KL from a mean field, needs only
    products with it; draws need its inverse. It is immutable: methods return other Gaussians.

    Args:
        blocks: how the sites are one vector.
        loc: `m`, `(P,)`.
        precision: `A`.
        absorbed: key of the curvature that `A` contains, for posteriors of Laplace approximations:
            where it is the prior of the same net, that curvature is not added again.

    Attributes:
        terms: pairs `(m_t, A_t)` of all factors; one, unless `product` made it.

    Raises:
        ValueError: sizes that do not fit.

    Example:
        >>> from tyxe.linalg import Dense
        >>> blocks = ParamBlocks.of_sites({"net.weight": Size([1, 1]), "net.bias": Size([1])})
        >>> q = Gaussian(blocks, torch.zeros(2), Dense(torch.tensor([[2.0, 1.0], [1.0, 1.0]])))
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
        super().__init__(tuple(blocks.sites), Size((blocks.size,)))
        check.shape("loc", loc, (blocks.size,))
        self.blocks, self.absorbed = blocks, absorbed
        self.terms: list[Term] = [(loc, precision)]

    @classmethod
    def product(
        cls, blocks: ParamBlocks, terms: Sequence[Term], absorbed: int | None = None
    ) -> Gaussian:
        """Return `prod_t N(m_t, A_t^-1)`, of which a factor may be singular, such as a curvature.

        With `A = sum A_t` and `m = A^-1 sum A_t m_t` it is `N(m, A^-1)` where the inverse of the
        sum can be computed, as for diagonals. Else it keeps its factors, and is a penalty
        [T eq. 3.71]: its density is known up to a constant, draws and moments are not.
        """
        found = cls(blocks, *terms[0], absorbed).with_terms(blocks, terms)
        precision = found.precision
        if not invertible(precision):
            return found
        pulls = torch.stack([factor.matmul(loc) for loc, factor in terms])
        return cls(blocks, precision.solve(pulls.sum(0)), precision, absorbed)

    def with_terms(self, blocks: ParamBlocks, terms: Iterable[Term]) -> Gaussian:
        """Return a Gaussian of other factors over the same sites, with the same `absorbed`."""
        found = copy.copy(self)
        found.blocks, found.names, found.terms = blocks, tuple(blocks.sites), list(terms)
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> Gaussian:
        """Return the Gaussian with a function of each of its tensors, such as a move."""
        terms = [(function(loc), factor.map(function)) for loc, factor in self.terms]
        return self.with_terms(self.blocks, terms)

    def reordered(self, blocks: ParamBlocks) -> Gaussian:
        """Return the Gaussian with its weights in the order of other blocks.

        Raises:
            ValueError: other sites; coupled weights too many for a dense matrix.
        """
        if self.blocks == blocks:
            return self
        size = self.blocks.size
        if set(self.names) != set(blocks.sites) or size != blocks.size:
            raise ValueError(
                f"the prior has {size} weights of {', '.join(self.names)}; expected {blocks.size} "
                f"of {', '.join(blocks.sites)}"
            )
        if not self.is_factorized and size > SMALL:
            raise ValueError(
                f"the joint prior has {size:,} weights in another order than the curvature's, "
                f"{', '.join(blocks.names)}, and a dense matrix in between takes at most {SMALL:,}:"
                " let the prior be the posterior of a LaplaceBNN of the same net"
            )
        positions = torch.arange(size, device=self.terms[0][0].device)
        order = blocks.flatten(self.unflatten(positions))
        if self.is_factorized:
            return self.with_terms(
                blocks, [(self.loc[order], blocks.diagonal(self.precision.diagonal()[order]))]
            )
        return self.with_terms(blocks, [(m[order], permuted(a, order)) for m, a in self.terms])

    @property
    def loc(self) -> Tensor:
        """The mean `m`, `(P,)`; a penalty of several factors, which has none, is a ValueError."""
        if len(self.terms) > 1:
            raise ValueError(
                f"a product of {len(self.terms)} Normals with structured precisions has neither "
                'moments nor draws: it is a penalty. Keep one Normal with accumulate="average"'
            )
        return self.terms[0][0]

    @property
    def precision(self) -> Operator:
        """The sum of all factors' precisions."""
        (_, first), *others = self.terms
        for _, other in others:
            first = plus(first, other)
        return first

    @property
    def is_factorized(self) -> bool:
        """Whether it is one Normal for each weight."""
        return len(self.terms) == 1 and is_diagonal(self.precision)

    @property
    def log_normalizer(self) -> Tensor:
        """The constant of the log-density; 0 if the precision's determinant cannot be computed."""
        loc, precision = self.terms[0]
        if len(self.terms) > 1 or not invertible(precision):
            return loc.new_zeros(())
        # That of a prior is the same in every step.
        logdet = precision.logdet() if precision.requires_grad else precision.known_logdet
        return logdet / 2 - loc.numel() * LOG_SQRT_2PI

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        _ = self.loc  # which a penalty has not
        return self.precision.inverse_diagonal()

    def unflatten(self, value: Tensor) -> dict[str, Tensor]:
        return self.blocks.unflatten(value)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.blocks.flatten(values).to(self.terms[0][0].dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of vectors `(..., P)`, in nats."""
        forms = [quadratic(operator, value - loc) for loc, operator in self.terms]
        return self.log_normalizer - torch.stack(forms).sum(0) / 2

    def rsample(self, sample_shape: Size | tuple[int, ...] = ()) -> Tensor:
        return self.loc + self.precision.sample(tuple(sample_shape))

    def by_site(self) -> dict[str, td.Distribution]:
        """Return a distribution for each site: Normals of independent weights, else marginals.

        The Normals know what is `absorbed`, as the marginals do by their `joint`.
        """
        if not self.is_factorized:
            return {name: self.marginal(name) for name in self.names}
        scales = self.unflatten(self.precision.inverse_diagonal().sqrt())
        normals = {
            name: dist.Normal(loc, scales[name]).to_event()
            for name, loc in self.unflatten(self.loc).items()
        }
        for normal in normals.values():
            normal.absorbed = self.absorbed
        return normals

    def marginal_log_prob(self, name: str, value: Tensor) -> Tensor:
        """Return the log-density of one site alone, from its own dense covariance.

        Raises:
            ValueError: its elements are dependent, and too many for a dense covariance.
        """
        loc = self.unflatten(self.loc)[name].flatten()
        block, which = self._block_of(name)
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

    def outline(self) -> dict[str, Any]:
        """Return the structure without its numbers, as plain values, for `from_outline`."""
        terms = [
            {key: list(tensor.shape) for key, tensor in as_state(operator).items()}
            for _, operator in self.terms
        ]
        return {**as_state(self.blocks), "terms": terms}

    @classmethod
    def from_outline(cls, outline: Mapping[str, Any]) -> Gaussian:
        """Return a Gaussian of zeros with the structure of an `outline`, to load a state into."""
        blocks, terms = of_state(ParamBlocks, {"blocks": outline["blocks"]}), []
        for shapes in outline["terms"]:
            zeros = {
                key: torch.zeros((), device="cpu").expand(shape) for key, shape in shapes.items()
            }
            operator = of_state(Operator, zeros)
            terms.append((torch.zeros(operator.size, device="cpu"), operator))
        return cls(blocks, *terms[0]).with_terms(blocks, terms)


# --------------------------------------------------------------------------- KL divergences

HALF_LOG_2PI_E = LOG_SQRT_2PI + 0.5


def normal_moments(q: td.Distribution) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean, variance and log-scale of independent Normals over one site, or None."""
    normal = as_gaussian(q)
    if normal is None:
        return None
    if isinstance(normal, FactorizedNormal):
        return normal.loc, normal.variance, normal.log_scale
    scale = at_least_float32(normal.scale)
    return normal.loc, scale.square(), scale.log()


def _vectors(sites: IndependentSites, joint: Gaussian) -> list[Tensor]:
    """Return means, variances and log-scales of independent Normals as vectors."""
    moments = {name: normal_moments(one) for name, one in sites.distributions.items()}
    known = {name: found for name, found in moments.items() if found is not None}
    if set(known) != set(joint.names) or len(known) < len(moments):
        raise NotImplementedError
    return [joint.flatten({n: found[i] for n, found in known.items()}) for i in range(3)]


@td.register_kl(IndependentSites, Gaussian)
def _kl_independent_gaussian(q: IndependentSites, p: Gaussian) -> Tensor:
    """`sum_t 1/2 [diag(A_t) . v + (mu - m_t)^T A_t (mu - m_t)]`, less entropy and normaliser."""
    points = {name: one for name, one in q.distributions.items() if isinstance(one, dist.Delta)}
    if set(points) == set(q.distributions) == set(p.names):
        log_density = torch.stack([one.log_density.sum() for one in points.values()]).sum()
        return log_density - p.log_prob(p.flatten({name: one.v for name, one in points.items()}))
    mean, variance, log_scale = _vectors(q, p)
    entropy = log_scale.sum() + mean.numel() * HALF_LOG_2PI_E
    energies = [quadratic(a, mean - m) + a.diagonal() @ variance for m, a in p.terms]
    return torch.stack(energies).sum() / 2 - p.log_normalizer - entropy


@td.register_kl(Gaussian, Gaussian)
def _kl_gaussians(q: Gaussian, p: Gaussian) -> Tensor:
    """`sum_t 1/2 [tr(A_t Lambda^-1) + (mu - m_t)^T A_t (mu - m_t)]`, less entropy, normaliser."""
    if q.blocks != p.blocks:
        raise NotImplementedError
    energies = [quadratic(a, q.loc - m) + trace_of_solve(a, q.precision) for m, a in p.terms]
    return torch.stack(energies).sum() / 2 - p.log_normalizer - _entropy(q)


@td.register_kl(Gaussian, IndependentSites)
def _kl_gaussian_independent(q: Gaussian, p: IndependentSites) -> Tensor:
    """`sum 1/2 (v + (mu - m)^2) / s^2 + log s + 1/2 log 2 pi`, less entropy, `v` the variances."""
    mean, variance, log_scale = _vectors(p, q)
    energy = ((q.variance + (q.loc - mean).square()) / variance).sum() / 2 + log_scale.sum()
    return energy + q.loc.numel() * LOG_SQRT_2PI - _entropy(q)


def _entropy(q: Gaussian) -> Tensor:
    return q.loc.numel() * HALF_LOG_2PI_E - q.precision.logdet() / 2
