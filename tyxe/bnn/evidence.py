"""The evidence of a Laplace approximation, and priors that maximise it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributions as td
from torch import Tensor

from tyxe.curvature import Curvature, Group, joined
from tyxe.distributions import JointMarginal
from tyxe.distributions.normal import wide
from tyxe.likelihoods import HomoskedasticGaussian, Likelihood
from tyxe.linalg import BlockDiagonal, Diagonal, Kronecker, Operator

__all__ = [
    "Precisions",
    "gaussian_log_likelihood",
    "log_evidence",
    "logdet_of_numbers",
    "posterior_precision",
    "prior_moments",
    "with_noise",
]

Precisions = Mapping[str, Tensor]


def prior_moments(
    priors: Iterable[tuple[str, object]], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return mean and precision of every weight under Gaussian priors, by site.

    Args:
        priors: each site's name and prior.
        shapes: of the sites.

    Returns:
        Two dictionaries of tensors, in float32 at least: there are sums over all weights.

    Raises:
        ValueError: a prior that is no factorised Normal.
    """
    means, precisions = {}, {}
    for name, prior in priors:
        if isinstance(prior, JointMarginal):
            raise ValueError(
                f"the prior is one over all sites, the posterior of earlier data, and this takes "
                f"Normals of each: {name!r} has none. Do it on the first task, before "
                "update_prior"
            )
        base = prior.base_dist if isinstance(prior, td.Independent) else prior
        if not isinstance(base, td.Normal):
            kind = type(base).__name__ if isinstance(base, td.Distribution) else "hierarchical"
            raise ValueError(
                f"the Laplace approximation needs Gaussian priors, but that of {name!r} is "
                f"{kind}; use tyxe.priors.IIDPrior(dist.Normal(0, scale)), or VariationalBNN"
            )
        means[name] = wide(base.loc).expand(shapes[name])
        precisions[name] = wide(base.scale).square().reciprocal().expand(shapes[name])
    return means, precisions


def posterior_precision(
    curvature: Curvature, precisions: Precisions, temperature: float, damping: bool
) -> BlockDiagonal:
    """Return `G / T + P0`, or the damped form [T 3.41].

    Args:
        curvature: `G`.
        precisions: the prior's, by site: a number, or a value of each weight.
        temperature: `T`.
        damping: spread the prior's precision over both factors of Kronecker blocks.

    Raises:
        ValueError: weight and bias of a Kronecker block have different prior precisions.
    """
    # As it is, it keeps what a hundred prior precisions have in common.
    scaled = curvature.operator
    if temperature != 1:
        scaled = scaled.scaled(1.0 / temperature)
    blocks: dict[str, Operator] = {}
    if list(scaled.blocks) == ["all"]:
        vector = joined(curvature.groups, precisions)
        return BlockDiagonal({"all": scaled.blocks["all"].add_diagonal(vector)})
    for group, (name, block) in zip(curvature.groups, scaled.blocks.items(), strict=True):
        blocks[name] = _with_prior(block, group, precisions, damping)
    return BlockDiagonal(blocks)


def _with_prior(block: Operator, group: Group, precisions: Precisions, damping: bool) -> Operator:
    if isinstance(block, Diagonal):
        return block.add_diagonal(group.to_vector(precisions))
    values = [precisions[site] for site in group.sites]
    number = _one_number(values)
    if number is None:
        raise ValueError(
            f"the weights of {' and '.join(group.sites)} have different prior precisions, which "
            'a Kronecker product does not take: give them one, or use structure="diag" or "full"'
        )
    if any(v.requires_grad for v in values) and any(v is not number for v in values):
        number = _shared_out(_plus(block, number.detach(), damping), group, precisions, number)
    return _plus(block, number, damping)


def _shared_out(
    posterior: Operator, group: Group, precisions: Precisions, number: Tensor
) -> Tensor:
    """The number, with a gradient for each weight's own: as of the variance that it has left."""
    variances = posterior.inverse_diagonal().detach()
    own = group.to_vector(precisions).to(variances)
    return number.detach() + (own - own.detach()) @ (variances / variances.sum())


def _plus(block: Operator, number: Tensor, damping: bool) -> Operator:
    if isinstance(block, BlockDiagonal):
        return BlockDiagonal({n: _shifted(b, number, damping) for n, b in block.blocks.items()})
    return _shifted(block, number, damping)


def _one_number(values: list[Tensor]) -> Tensor | None:
    """The number that all values are, or None."""
    first = values[0] if values[0].dim() == 0 else values[0].flatten()[0]
    # A number that several sites share need not be compared with itself.
    others = [value for value in values if value is not first]
    if not all(bool((value == first).all()) for value in others):
        return None
    return first


def _shifted(block: Operator, number: Tensor, damping: bool) -> Operator:
    shifted = block.add_diagonal(number)
    return shifted.damped() if damping and isinstance(shifted, Kronecker) else shifted


def logdet_of_numbers(
    curvature: Curvature, owner: Mapping[str, str], temperature: float, damping: bool
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return `log det Lambda` as a function of prior precisions that many weights share.

    Where `Lambda` is `G / T` plus a multiple of the identity, in each block, it takes nothing but
    the eigenvalues of `G`, all together.

    Args:
        curvature: `G`.
        owner: for each site the name of its precision.
        temperature: `T`.
        damping: as in `posterior_precision`.
    """
    blocks, names = curvature.operator.blocks, set(owner.values())
    if damping or (list(blocks) == ["all"] and len(names) > 1):
        return lambda numbers: posterior_precision(
            curvature, {site: numbers[owner[site]] for site in owner}, temperature, damping
        ).logdet()
    spectra: dict[str, list[Tensor]] = {name: [] for name in names}
    for group, block in zip(curvature.groups, blocks.values(), strict=False):
        spectra[owner[group.sites[0]]].append(_spectrum(block) / temperature)
    together = {name: torch.cat(parts) for name, parts in spectra.items()}

    def logdet(numbers: Mapping[str, Tensor]) -> Tensor:
        parts = [(together[name] + number).log().sum() for name, number in numbers.items()]
        return torch.stack(parts).sum()

    return logdet


def _spectrum(block: Operator) -> Tensor:
    """All eigenvalues, `(P,)`."""
    if isinstance(block, Kronecker):
        return block.eigenvalues.flatten()
    if isinstance(block, BlockDiagonal):
        return torch.cat([_spectrum(part) for part in block.blocks.values()])
    if isinstance(block, Diagonal):
        return block.diagonal()
    values: Tensor = torch.linalg.eigvalsh(block.to_dense().double())
    return values.clamp_min(0).to(block.dtype)


def log_evidence(
    log_likelihood: float | Tensor,
    squared_deviations: Mapping[str, Tensor],
    precisions: Precisions,
    posterior: Operator,
    temperature: float,
) -> Tensor:
    r"""Return the log marginal likelihood of the Laplace approximation, in nats.

    `log p(D|w*)/T - 1/2 (w* - m0)^T P0 (w* - m0) + 1/2 log det P0 - 1/2 log det Lambda` [LA].

    Args:
        log_likelihood: `log p(D|w*)`.
        squared_deviations: `(w* - m0)^2` of each weight, by site.
        precisions: `P0`, by site: a number, or a value of each weight.
        posterior: `Lambda`.
        temperature: `T`.
    """
    penalties = [_penalty(square, precisions[s]) for s, square in squared_deviations.items()]
    penalty = torch.stack(penalties).sum()
    return log_likelihood / temperature - (penalty + posterior.logdet()) / 2


def _penalty(square: Tensor, precision: Tensor) -> Tensor:
    """One site's part of `(w* - m0)^T P0 (w* - m0) - log det P0`."""
    if precision.dim() == 0:
        return precision * square.sum() - square.numel() * precision.log()
    return (precision * square).sum() - precision.log().sum()


def with_noise(
    curvature: Curvature,
    likelihood: Likelihood,
    noise: float | Tensor,
    like: Tensor,
    is_empirical: bool,
) -> tuple[Curvature, Tensor]:
    """Return curvature and log-likelihood that another noise would give.

    Args:
        curvature: under the likelihood's own noise.
        likelihood: a homoskedastic Gaussian.
        noise: standard deviation.
        like: a tensor of the weights' dtype, on their device.
        is_empirical: the curvature is of the true residuals, which the noise does not scale.

    Raises:
        ValueError: another likelihood; a noise that is not one positive number.
    """
    if not isinstance(likelihood, HomoskedasticGaussian):
        raise ValueError(
            f"noise is that of a HomoskedasticGaussian, not of a {type(likelihood).__name__}"
        )
    scale = torch.as_tensor(noise, dtype=like.dtype, device=like.device)
    if scale.dim() or not bool(scale > 0):
        raise ValueError(f"noise is {noise}; expected one positive number")
    ratio = (likelihood.scale_of(like=like) / scale).square()
    factor = ratio.square() if is_empirical else ratio
    scaled = dataclasses.replace(curvature, operator=curvature.operator.scaled(factor))
    # A Gaussian's error is the sum of squares.
    return scaled, gaussian_log_likelihood(curvature.error, curvature.num_targets, scale)


def gaussian_log_likelihood(squared_error: float, count: float, noise: Tensor) -> Tensor:
    """Return the log-likelihood of targets whose residuals have a sum of squares.

    Args:
        squared_error: that sum.
        count: number of target elements.
        noise: standard deviation of the noise.
    """
    return -0.5 * (
        squared_error / noise.square() + count * (2 * noise.log() + math.log(2 * math.pi))
    )
