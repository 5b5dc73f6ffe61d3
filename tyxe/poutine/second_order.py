"""Second-order terms of a batch's log-likelihood about a guide's means [VL 4, GR 4]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributions as td
from pyro import distributions as dist
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import constraints

# Weights up to which the Hessian's exact diagonal is computed, with a backward pass for each.
HESSIAN_LIMIT = 20_000
# Rows of the Hessian that are computed at a time.
HESSIAN_CHUNK = 64


class Expansion(NamedTuple):
    """One site at its mean (a leaf of the graph or a node in it), with its elementwise variance."""

    name: str
    loc: Tensor
    variance: Tensor


class SecondOrderTerm(ABC):
    """One estimator of the second-order term of a batch, in nats and not scaled to the data set."""

    @abstractmethod
    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        """Return an estimate of `1/2 sum_l sigma_l^2 d^2 log p(y | mu) / dmu_l^2` for each site.

        Args:
            fn: the distribution of the batch's targets at the mean weights.
            value: the targets.
            mask: the rows that count, or None.
            sites: the sites at their means.

        Returns:
            `(number of sites,)`, differentiable in means and variances.
        """


def _log_prob(fn: Any, value: Tensor, mask: Any) -> Tensor:
    total: Tensor = scale_and_mask(fn.log_prob(value), 1.0, mask).sum()
    return total


def _gradients(log_prob: Tensor, sites: Sequence[Expansion]) -> list[Tensor]:
    """Return differentiable gradients at the means; zeros where a site was not used."""
    locs = [site.loc for site in sites]
    if not log_prob.requires_grad:
        return [torch.zeros_like(loc) for loc in locs]
    found = torch.autograd.grad(log_prob, locs, create_graph=True, allow_unused=True)
    return [torch.zeros_like(loc) if g is None else g for g, loc in zip(found, locs, strict=True)]


class WeightedSquares(torch.autograd.Function):
    """`sum v g^2` as a single node, with one pass over the tensors forward and one per gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values)
        return (weights * values).mul_(values).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, values = ctx.saved_tensors
        scaled = grad * values
        return scaled * values, 2 * (scaled * weights)


def _minus_half_of_squares(gradients: Sequence[Tensor], sites: Sequence[Expansion]) -> Tensor:
    pairs = zip(sites, gradients, strict=True)
    # Variances are in float32 at least, gradients in the type of the weights.
    parts = [WeightedSquares.apply(s.variance, g.to(s.variance.dtype)) for s, g in pairs]
    return -0.5 * torch.stack(parts)


class Fisher(SecondOrderTerm):
    """`-1/2 sum sigma^2 gt^2`, where `gt` is the batch's gradient at pseudo-labels [VL 28, 29].

    Scores of labels that the model itself draws are independent with mean zero, so that the square
    of their sum has the expectation of the sum of squares: the diagonal of the Fisher information.
    """

    def pseudo_labels(self, fn: Any) -> Tensor:
        """Draw targets from the model, or raise a TypeError if it cannot be sampled."""
        try:
            labels: Tensor = fn.sample()
        except NotImplementedError:
            inner = fn.base_dist if isinstance(fn, td.Independent) else fn
            raise TypeError(
                f"variational_laplace draws pseudo-labels, but {type(inner).__name__}, the "
                "likelihood's predictive distribution, has no sample(): implement it, or pass "
                'curvature="empirical" (the true labels, a biased estimate)'
            ) from None
        return labels

    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        log_prob = _log_prob(fn, self.pseudo_labels(fn), mask)
        return _minus_half_of_squares(_gradients(log_prob, sites), sites)


class Empirical(SecondOrderTerm):
    """`-1/2 sum sigma^2 g^2`, where `g` is the batch's gradient at its true labels [VL 26]."""

    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        return _minus_half_of_squares(_gradients(_log_prob(fn, value, mask), sites), sites)


class Hessian(SecondOrderTerm):
    """`1/2 sum sigma^2 H_ll`, with the exact diagonal at the true labels [VL 18].

    `diagonals` has those of the last batch, by site and without gradients.
    """

    def __init__(self) -> None:
        self.diagonals: dict[str, Tensor] = {}

    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        count = sum(site.loc.numel() for site in sites)
        if count > HESSIAN_LIMIT:
            raise ValueError(
                f'curvature="hessian" takes a backward pass for each of {count:,} weights, and is '
                f'for nets of up to {HESSIAN_LIMIT:,}: use curvature="fisher"'
            )
        gradients = _gradients(_log_prob(fn, value, mask), sites)
        diagonals = [_diagonal(g, s.loc) for g, s in zip(gradients, sites, strict=True)]
        self.diagonals = {s.name: d.detach() for s, d in zip(sites, diagonals, strict=True)}
        parts = [(s.variance * d).sum() for d, s in zip(diagonals, sites, strict=True)]
        return 0.5 * torch.stack(parts)


def _diagonal(gradient: Tensor, loc: Tensor) -> Tensor:
    """Return `d gradient_l / d loc_l`, differentiable."""
    if not gradient.requires_grad:
        return torch.zeros_like(loc)
    size, parts = loc.numel(), []
    for start in range(0, size, HESSIAN_CHUNK):
        rows = torch.arange(start, min(start + HESSIAN_CHUNK, size), device=loc.device)
        basis = torch.zeros(len(rows), size, dtype=gradient.dtype, device=loc.device)
        basis[torch.arange(len(rows)), rows] = 1.0
        (columns,) = torch.autograd.grad(
            gradient,
            loc,
            basis.view(-1, *loc.shape),
            create_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
        if columns is None:
            return torch.zeros_like(loc)
        parts.append(columns.reshape(len(rows), size).gather(1, rows[:, None])[:, 0])
    return torch.cat(parts).view(loc.shape)


SECOND_ORDER_TERMS: dict[str, type[SecondOrderTerm]] = {
    "fisher": Fisher,
    "hessian": Hessian,
    "empirical": Empirical,
}


class Shifted(dist.TorchDistribution):
    """A distribution with a `shift` added to its log-density, in nats, per element of its batch.

    It is not normalised: an observed site carries another term of an objective with it. Draws are
    those of `base_dist`.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(self, base_dist: td.Distribution, shift: Tensor) -> None:
        self.base_dist, self.shift = base_dist, shift
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:
        return self.base_dist.has_rsample

    @property
    def support(self) -> constraints.Constraint | None:
        return self.base_dist.support

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return self.base_dist.sample(torch.Size(sample_shape))

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return self.base_dist.rsample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob: Tensor = self.base_dist.log_prob(value) + self.shift
        return log_prob
