"""Options of a Laplace approximation, and the resulting precision of the posterior."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tyxe import check
from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian
from tyxe.linalg import BlockDiagonal, Kronecker, Operator, Sum
from tyxe.linalg.functions import average, is_diagonal, plus

# Functions that combine an earlier precision and a new curvature.
ACCUMULATE: dict[str, Callable[[Operator, Operator], Operator]] = {
    "sum": plus,
    "average": average,
    "per_task": plus,
}
# How the options that are attributes of a `LaplaceState` are checked.
POSITIVE: dict[str, Any] = {"rule": check.number, "above": 0}
KNOWN: dict[str, Any] = {"rule": check.choice, "known": ACCUMULATE}
# The structures that use an option, of those that not all of them do.
USED_BY = {
    "num_passes": ("kron", "diag", "full"),
    "damping": ("kron",),
    "reduce": ("kron",),
    "rank": ("lowrank",),
    "tolerance": ("lowrank",),
}


@dataclass(frozen=True)
class LaplaceOptions:
    """Options of a `LaplaceBNN` besides the model, which are read at `bnn.options`.

    Attributes:
        num_passes: number of passes of `fit_curvature` through its loader, for augmented data; not
            for `"lowrank"`, whose data stay the same.
        damping: for `"kron"`, spread the prior's precision over both factors [T 3.41].
        curvature_weight: `lambda` of online Laplace, which multiplies the curvature in the
            posterior and not in the fit [T 3.56]; with a value above 1 later tasks forget less.
        accumulate: how the prior's precision and a new curvature are combined: `"sum"`, which for
            `"kron"` keeps a product for each task [T 3.59]; `"average"`, one product of averaged
            factors [T 3.60]; or `"per_task"`, a penalty for each task about its own mode [T 3.71].
        reduce: for `"kron"`, sum over positions that share weights before the product; otherwise
            each position counts as a data point.
        rank: for `"lowrank"`, number of eigenpairs, or all if there are fewer.
        tolerance: for `"lowrank"`, only pairs with larger eigenvalues are kept. At temperature 1,
            those far below the prior's precision change the posterior little.

    Raises:
        TypeError: an option of another type.
        ValueError: a number that is not positive; an unknown `accumulate`.

    Example:
        >>> LaplaceOptions(accumulate="average", curvature_weight=3.0).num_passes
        1
    """

    num_passes: int = check.field(1, check.count)
    damping: bool = check.field(False, check.flag)
    curvature_weight: float = check.field(1.0, **POSITIVE)
    accumulate: str = check.field("sum", **KNOWN)
    reduce: bool = check.field(False, check.flag)
    rank: int = check.field(100, check.count)
    tolerance: float = check.field(0.0, check.number, least=0)

    def __post_init__(self) -> None:
        check.fields(self)

    def check_used(self, structure: str) -> None:
        """Raise a ValueError for an option that a structure does not use."""
        for each in dataclasses.fields(self):
            value, structures = getattr(self, each.name), USED_BY.get(each.name, (structure,))
            if structure not in structures and value != each.default:
                expected = " or ".join(map(repr, structures))
                raise ValueError(
                    f"the option {each.name} is {value!r}, and is not used by "
                    f"structure={structure!r}: leave it out, or take structure={expected}"
                )

    def of_state(self) -> dict[str, Any]:
        """Return the options that are attributes of a `LaplaceState`, by name."""
        return {name: getattr(self, name) for name in ("damping", "curvature_weight", "accumulate")}


def posterior_precision(
    prior: Gaussian, curvature: Curvature, weight: float, damping: bool, accumulate: str
) -> BlockDiagonal:
    """Return `Lambda = weight G + P0`, or its damped form [T 3.41].

    `G` is the curvature's operator, `P0` the prior's precision over the same blocks, and the weight
    `lambda / T`. If the prior is the posterior of earlier data, with precision `Lambda_t`, then
    this is `Lambda_{t+1}` [T 3.56].
    """
    check_damping(damping, prior)
    if curvature.is_empty:
        return _as_blocks(prior.precision)
    # Unscaled, the operator keeps its factorisations, which many prior precisions share.
    scaled = curvature.operator if weight == 1 else curvature.operator.scaled(weight)
    found = _as_blocks(ACCUMULATE[accumulate](prior.precision, scaled))
    if is_diagonal(prior.precision):
        for block, operator in zip(curvature.blocks, found.blocks.values(), strict=False):
            _check_structured(operator, block.sites)
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


def _check_structured(operator: Operator, sites: list[str]) -> None:
    """Raise where a Kronecker block plus a diagonal prior has become a `Sum`."""
    if isinstance(operator, BlockDiagonal):
        for part in operator.blocks.values():
            _check_structured(part, sites)
    if isinstance(operator, Sum):
        raise ValueError(
            f"the weights of {' and '.join(sites)} have different prior precisions, which a "
            'Kronecker product does not take: give them one, or use structure="diag" or "full"'
        )


def _damped(precision: BlockDiagonal) -> BlockDiagonal:
    def damped(operator: Operator) -> Operator:
        if isinstance(operator, BlockDiagonal):
            return _damped(operator)
        return operator.damped() if isinstance(operator, Kronecker) else operator

    return BlockDiagonal({name: damped(operator) for name, operator in precision.blocks.items()})
