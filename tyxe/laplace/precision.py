"""The posterior's precision, from that of the prior and a weighted curvature."""

from __future__ import annotations

from collections.abc import Callable

from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.linalg import BlockDiagonal, Kronecker, Operator, Sum
from tyxe.linalg.functions import average, is_diagonal, plus

# Functions that combine an earlier precision and a new curvature.
ACCUMULATE: dict[str, Callable[[Operator, Operator], Operator]] = {
    "sum": plus,
    "average": average,
    "per_task": plus,
}


def posterior_precision(
    prior: Gaussian,
    curvature: Curvature,
    weight: float = 1.0,
    damping: bool = False,
    accumulate: str = "sum",
) -> BlockDiagonal:
    """Return `Lambda = weight G + P0`, or its damped form [T 3.41].

    If the prior is the posterior of earlier data, with precision `Lambda_t`, then this is
    `Lambda_{t+1}` [T 3.56].

    Args:
        prior: a prior over the curvature's blocks, with precision `P0`.
        curvature: `G`; one of no data adds nothing.
        weight: `lambda / T`.
        damping: spread the prior's precision over both factors of Kronecker blocks.
        accumulate: a name in `ACCUMULATE`.

    Raises:
        ValueError: the weights of a Kronecker block have different prior precisions; damping with
            a prior that couples weights.
    """
    check_damping(damping, prior)
    if curvature.is_empty:
        return _as_blocks(prior.precision)
    # Unscaled, the operator keeps its factorisations, which many prior precisions share.
    scaled = curvature.operator if weight == 1 else curvature.operator.scaled(weight)
    found = _as_blocks(ACCUMULATE[accumulate](prior.precision, scaled))
    if is_diagonal(prior.precision):
        _check_structured(found, curvature.blocks)
    return _damped(found) if damping else found


def check_damping(damping: bool, prior: Gaussian) -> None:
    """Raise a ValueError for damping with a prior that couples weights."""
    if damping and not is_diagonal(prior.precision):
        raise ValueError(
            "damping spreads the prior's precision over both factors, and a joint prior has no one "
            "precision: set damping=False before the second task"
        )


def _as_blocks(operator: Operator) -> BlockDiagonal:
    """Return an operator as blocks; one without blocks becomes the block `"all"`."""
    return operator if isinstance(operator, BlockDiagonal) else BlockDiagonal({"all": operator})


def _check_structured(precision: BlockDiagonal, blocks: ParamBlocks) -> None:
    """Raise where a Kronecker block plus a diagonal prior has become a `Sum`."""
    for block, operator in zip(blocks, precision.blocks.values(), strict=False):
        parts = operator.blocks.values() if isinstance(operator, BlockDiagonal) else [operator]
        if any(isinstance(part, Sum) for part in parts):
            raise ValueError(
                f"the weights of {' and '.join(block.sites)} have different prior precisions, "
                "which a Kronecker product does not take: give them one, or use "
                'structure="diag" or "full"'
            )


def _damped(precision: BlockDiagonal) -> BlockDiagonal:
    def damped(operator: Operator) -> Operator:
        if isinstance(operator, BlockDiagonal):
            return _damped(operator)
        return operator.damped() if isinstance(operator, Kronecker) else operator

    return BlockDiagonal({name: damped(operator) for name, operator in precision.blocks.items()})
