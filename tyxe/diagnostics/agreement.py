"""How far two predictives are apart, such as a method's and that of long chains."""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe.metrics.checks import check_probs, check_real, check_weights


def agreement(probs: Tensor, reference: Tensor) -> Tensor:
    """Return the share of points whose most probable class is the same, for `(n, C)` each.

    Reference:
        Izmailov et al. 2021, What are Bayesian neural network posteriors really like?

    Example:
        >>> one = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> agreement(one, torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
        tensor(0.5000)
    """
    one, two = _probs(probs, reference)
    return (one.argmax(-1) == two.argmax(-1)).to(one.dtype).mean()


def total_variation(probs: Tensor, reference: Tensor) -> Tensor:
    """Return `1/2 sum_c |p_c - q_c|`, averaged over points, for `(n, C)` each.

    Reference:
        Izmailov et al. 2021.

    Example:
        >>> total_variation(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]]))
        tensor(0.3000)
    """
    one, two = _probs(probs, reference)
    return 0.5 * (one - two).abs().sum(-1).mean()


def wasserstein2(samples: Tensor, reference: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the distance of two predictives' samples at each point, averaged, in their units.

    For each number of a point it is `sqrt(int (F^-1(u) - G^-1(u))^2 du)` of the two empirical
    distributions, exactly, for any numbers of samples.

    Args:
        samples: shape `(S, n, ...)`, such as of `sample_predictive`.
        reference: shape `(R, n, ...)`.
        weights: of the samples, `(S,)`, as of an ensemble's draws; equal by default.

    Raises:
        TypeError: no tensors of numbers.
        ValueError: points of other shapes, or weights that are not one for each sample.

    Reference:
        Wilson et al. 2022, Evaluating approximate inference in Bayesian deep learning.

    Example:
        >>> wasserstein2(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]]))
        tensor(1.)
    """
    one, two = check_real("samples", samples), check_real("reference", reference)
    if one.shape[1:] != two.shape[1:] or one.dim() < 2:
        raise ValueError(
            f"samples {tuple(one.shape)} and reference {tuple(two.shape)} are of other points; "
            "expected (S, n, ...) and (R, n, ...)"
        )
    each = torch.ones(len(one)) if weights is None else check_weights(weights, one)
    one, one_ends = _quantiles(one, each)
    two, two_ends = _quantiles(two, torch.ones(len(two)))
    # Between these levels both quantile functions are constant.
    levels = torch.cat([one_ends, two_ends], 1).sort(1).values
    widths = levels.diff(dim=1, prepend=torch.zeros_like(levels[:, :1]))
    middles = levels - widths / 2
    one, two = (
        values.gather(1, torch.searchsorted(ends, middles).clamp_max(ends.shape[1] - 1))
        for values, ends in ((one, one_ends), (two, two_ends))
    )
    return ((one - two).square() * widths.to(one)).sum(1).sqrt().mean()


def _quantiles(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each number, `(m, S)`, and the levels up to which they are quantiles."""
    values, order = samples.flatten(1).mT.contiguous().sort(1)
    shares = (weights.double() / weights.double().sum()).to(samples.device)
    return values, shares[order].cumsum(1)


def _probs(probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    one, two = check_probs(probs), check_probs(reference)
    if one.shape != two.shape:
        raise ValueError(
            f"probabilities {tuple(one.shape)} and reference {tuple(two.shape)} are of other "
            "points or classes"
        )
    return one, two.to(one)
