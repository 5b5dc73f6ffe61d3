"""Online Laplace: the posterior of earlier data as the prior of the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tyxe.curvature import Curvature, Group, joined, separated
from tyxe.distributions import GaussianJoint, JointNormal, NormalProduct, product_of
from tyxe.linalg import (
    SMALL,
    BlockDiagonal,
    Dense,
    Diagonal,
    Operator,
    average,
    invertible,
    operator_state,
    plus,
)

__all__ = [
    "ACCUMULATE",
    "as_blocks",
    "emptied",
    "factorized_joint",
    "is_same",
    "joint_evidence",
    "joint_precision",
    "next_penalty",
    "reordered",
]

# How curvatures of tasks add up: from the earlier precision and the newest to what stands for both.
ACCUMULATE: dict[str, Callable[[Operator, Operator], Operator]] = {
    "sum": plus,
    "average": average,
    "modes": plus,
}


def joint_precision(
    curvature: Curvature, prior: GaussianJoint, weight: float, accumulate: str
) -> BlockDiagonal:
    """Return `Lambda_{t+1} = weight G_{t+1} + Lambda_t` [T 3.56].

    Args:
        curvature: `G_{t+1}`, or one of no data, which adds nothing.
        prior: whose precision is `Lambda_t`, over the same groups.
        weight: `lambda / T`.
        accumulate: a name in `ACCUMULATE`.
    """
    if not curvature.num_targets:
        return as_blocks(prior.precision)
    return as_blocks(ACCUMULATE[accumulate](prior.precision, curvature.operator.scaled(weight)))


def as_blocks(operator: Operator) -> BlockDiagonal:
    """Return an operator as blocks; one that has none is the block `"all"`."""
    return operator if isinstance(operator, BlockDiagonal) else BlockDiagonal({"all": operator})


def emptied(curvature: Curvature) -> Curvature:
    """Return the curvature of no data: what is left once the prior has taken it up."""
    operator = curvature.operator.scaled(0.0)
    return dataclasses.replace(
        curvature, operator=operator, log_likelihood=0.0, error=0.0, num_targets=0.0
    )


def factorized_joint(
    groups: Sequence[Group], means: dict[str, Tensor], precisions: dict[str, Tensor]
) -> JointNormal:
    """Return Normals per site as one over all of them.

    Args:
        groups: of the sites.
        means: by site.
        precisions: of each weight, by site.
    """
    mean, diagonal = (_wide(joined(groups, values)) for values in (means, precisions))
    parts = diagonal.split([group.size for group in groups])
    blocks = {group.name: Diagonal(part) for group, part in zip(groups, parts, strict=True)}
    return JointNormal(groups, mean, BlockDiagonal(blocks))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def next_penalty(
    prior: GaussianJoint, curvature: Curvature, loc: Tensor, weight: float
) -> GaussianJoint:
    """Return the prior times a term about the newest mode: a penalty for each task [T 3.71].

    Of diagonals this is elastic weight consolidation, with the prior's own term.

    Args:
        prior: of the newest task.
        curvature: of the newest task.
        loc: its mode, `(P,)`.
        weight: `lambda / T`.
    """
    factors = [JointNormal(prior.groups, m, a) for m, a in prior.terms]
    if curvature.num_targets:
        newest = curvature.operator.scaled(weight)
        factors.append(JointNormal(prior.groups, loc.to(newest.dtype), newest))
    return product_of(factors)


def reordered(prior: GaussianJoint, groups: list[Group]) -> GaussianJoint:
    """Return a prior over the weights in the order of a curvature's groups.

    Args:
        prior: over the same sites.
        groups: of the curvature.

    Raises:
        ValueError: they are over others; another order of more weights than fit a dense matrix.
    """
    if prior.groups == groups:
        return prior
    size = prior.event_shape.numel()
    if set(prior.names) != {site for group in groups for site in group.sites} or size > SMALL:
        raise ValueError(
            f"the joint prior has {size:,} weights in another order than the curvature's, "
            f"{', '.join(group.name for group in groups)}, and a dense matrix in between takes at "
            f"most {SMALL:,}: let the prior be the posterior of a LaplaceBNN of the same net"
        )
    positions = torch.arange(size, device=prior.terms[0][0].device)
    order = joined(groups, separated(prior.groups, positions))
    factors = [
        JointNormal(groups, m[order], Dense(a.to_dense()[order][:, order])) for m, a in prior.terms
    ]
    return factors[0] if len(factors) == 1 else NormalProduct(factors)


def joint_evidence(
    log_likelihood: float | Tensor,
    prior: GaussianJoint,
    loc: Tensor,
    posterior: Operator,
    temperature: float,
) -> Tensor:
    """Return the evidence of the newest data given the earlier, in nats, as `log_evidence` does.

    Args:
        log_likelihood: of the newest data at the mode.
        prior: the posterior of the earlier.
        loc: the mode, `(P,)`.
        posterior: `Lambda`.
        temperature: `T`.

    Raises:
        ValueError: the prior is a penalty without determinant.
    """
    if len(prior.terms) > 1 or not invertible(prior.precision):
        raise ValueError(
            "the prior is a penalty whose normaliser is not known, so there is no evidence: keep "
            'one term for all tasks, with accumulate="average"'
        )
    ((mean, operator),) = prior.terms
    penalty = operator.quadratic(loc.to(mean.dtype) - mean) - operator.logdet()
    return log_likelihood / temperature - (penalty + posterior.logdet()) / 2


def is_same(one: GaussianJoint, other: GaussianJoint, dtype: torch.dtype) -> bool:
    """Say whether two priors are the same up to rounding.

    Args:
        one: a prior.
        other: another.
        dtype: in which they have been stored.
    """
    if one.groups != other.groups or len(one.terms) != len(other.terms):
        return False
    for (m, a), (n, b) in zip(one.terms, other.terms, strict=True):
        mine, theirs = operator_state(a), operator_state(b)
        if mine.keys() != theirs.keys():
            return False
        pairs = [(m, n), *((tensor, theirs[key]) for key, tensor in mine.items())]
        if not all(_close(*pair, dtype) for pair in pairs):
            return False
    return True


def _close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(a, b.to(a), rtol=16 * torch.finfo(dtype).eps, atol=0.0)
