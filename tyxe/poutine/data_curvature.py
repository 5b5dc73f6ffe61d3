"""Second-order terms of a batch's log-likelihood about a guide's means [VL 4, GR 4]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributions as td
from pyro.distributions.util import scale_and_mask
from torch import Tensor

__all__ = ["CURVATURES", "Curvature", "Expansion"]

# Weights up to which the exact diagonal of the Hessian is computed: one more backward for each.
HESSIAN_LIMIT = 20_000
# Rows of the Hessian that go backward at a time.
HESSIAN_CHUNK = 64


class Expansion(NamedTuple):
    """One site at its mean.

    Attributes:
        name: of the site.
        loc: the mean, a leaf of the graph or a node in it.
        variance: elementwise.
    """

    name: str
    loc: Tensor
    variance: Tensor


class Curvature(ABC):
    """One way to estimate the second-order term of a batch, nats, not yet scaled to the data."""

    @abstractmethod
    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        """Return an estimate of `1/2 sum_l sigma_l^2 d^2 log p(y | mu) / dmu_l^2` of each site.

        Args:
            fn: the distribution of the batch's targets at the mean weights.
            value: the targets.
            mask: of the rows that count, or None.
            sites: at their means.

        Returns:
            `(number of sites,)`, differentiable in means and variances.
        """


def _log_prob(fn: Any, value: Tensor, mask: Any) -> Tensor:
    total: Tensor = scale_and_mask(fn.log_prob(value), 1.0, mask).sum()
    return total


def _gradients(log_prob: Tensor, sites: Sequence[Expansion]) -> list[Tensor]:
    """Differentiable gradients at the means; zeros where a site was not used."""
    locs = [site.loc for site in sites]
    if not log_prob.requires_grad:
        return [torch.zeros_like(loc) for loc in locs]
    found = torch.autograd.grad(log_prob, locs, create_graph=True, allow_unused=True)
    return [torch.zeros_like(loc) if g is None else g for g, loc in zip(found, locs, strict=True)]


class _WeightedSquares(torch.autograd.Function):
    """`sum v g^2` as a single node: a pass over the tensors forward, and one for each gradient."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(weights, values)
        return torch.dot((weights * values).reshape(-1), values.reshape(-1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, values = ctx.saved_tensors
        scaled = grad * values
        return scaled * values, 2 * (scaled * weights)


def _minus_half_of_squares(gradients: Sequence[Tensor], sites: Sequence[Expansion]) -> Tensor:
    pairs = zip(sites, gradients, strict=True)
    # Variances are in float32 at least, gradients in the type of the weights.
    parts = [_WeightedSquares.apply(s.variance, g.to(s.variance.dtype)) for s, g in pairs]
    return -0.5 * torch.stack(parts)


class Fisher(Curvature):
    """`-1/2 sum sigma^2 gt^2`, `gt` the batch's gradient at pseudo-labels [VL 28, 29].

    Scores of labels that the model itself draws have mean zero, so that the square of their sum is,
    on average, the sum of their squares: the diagonal of the batch's Fisher information.
    """

    def pseudo_labels(self, fn: Any) -> Tensor:
        """Draw targets from the model.

        Raises:
            TypeError: the distribution cannot be sampled.
        """
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


class Empirical(Curvature):
    """`-1/2 sum sigma^2 g^2`, `g` the batch's gradient at its true labels [VL 26]."""

    def terms(self, fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]) -> Tensor:
        return _minus_half_of_squares(_gradients(_log_prob(fn, value, mask), sites), sites)


class Hessian(Curvature):
    """`1/2 sum sigma^2 H_ll`, with the exact diagonal at the true labels [VL 18].

    Attributes:
        diagonals: of the last batch, by site, without gradients.
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
    """`d gradient_l / d loc_l`, differentiable."""
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


CURVATURES: dict[str, type[Curvature]] = {
    "fisher": Fisher,
    "hessian": Hessian,
    "empirical": Empirical,
}
