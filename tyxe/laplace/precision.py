"""Options of a Laplace approximation, its prior as one Gaussian, and the posterior's precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributions as td
from torch import Tensor

from tyxe import check
from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian, JointMarginal, ParamBlocks, as_gaussian
from tyxe.errors import warn
from tyxe.linalg import BlockDiagonal, Kronecker, Operator, Sum
from tyxe.linalg.functions import average, is_diagonal, plus
from tyxe.priors.sites import SitePrior
from tyxe.util import at_least_float32, without_events

PriorPrecision = float | Tensor | Mapping[str, float | Tensor]


def gaussian_prior(priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor) -> Gaussian:
    """Return the priors of all sites, given by joint name, as one Gaussian.

    Independent priors take the device of `like`, and its dtype if that is float32 at least.

    A prior that is not Gaussian, or couples some of the sites only, is a ValueError; so is a joint
    prior over too many weights in another order.
    """
    joints = {id(p.joint): p.joint for p in priors.values() if isinstance(p, JointMarginal)}
    if not joints:
        return _factorized_prior(priors, blocks, like)
    found = list(joints.values())
    if not isinstance(found[0], Gaussian) or set(found[0].names) != set(blocks.sites):
        kinds = ", ".join(f"{type(one).__name__} over {', '.join(one.names)}" for one in found)
        raise ValueError(
            "the Laplace approximation needs Gaussian priors, of each site or of all of them "
            f"together, but there is {kinds}"
        )
    prior = found[0]
    if prior.terms[0][0].dtype.itemsize < 4:
        prior = prior.map(at_least_float32)
    return prior.reordered(blocks)


def _factorized_prior(
    priors: Mapping[str, SitePrior], blocks: ParamBlocks, like: Tensor
) -> Gaussian:
    """Return Normals of each site as one over all sites, with a diagonal precision."""
    normals = {site: _normal(site, priors[site]) for site in blocks.sites}
    locs = {site: at_least_float32(n.loc) for site, n in normals.items()}
    scales = {site: at_least_float32(n.scale) for site, n in normals.items()}
    precisions = {site: scale.square().reciprocal() for site, scale in scales.items()}
    keys = {site: getattr(priors[site], "absorbed", None) for site in blocks.sites}
    key, *others = set(keys.values())
    if others:
        without = ", ".join(site for site, own in keys.items() if own is None)
        warn(
            f"some sites' priors hold the data of an earlier fit, and {without or 'others'} "
            "do not: until the next fit these data are counted twice"
        )
        key = None
    like = at_least_float32(like)
    loc, diagonal = (blocks.flatten(values).to(like) for values in (locs, precisions))
    return Gaussian(blocks, loc, blocks.diagonal(diagonal), key)


def _normal(site: str, prior: SitePrior) -> td.Normal:
    normal: td.Normal | None = as_gaussian(prior)
    if normal is None:
        inner = without_events(prior)
        kind = type(inner).__name__ if isinstance(inner, td.Distribution) else "hierarchical"
        raise ValueError(
            f"the Laplace approximation needs Gaussian priors, but that of {site!r} is "
            f"{kind}; use tyxe.priors.IIDPrior(dist.Normal(0, scale)), or VariationalBNN"
        )
    return normal


def independent_terms(prior: Gaussian) -> tuple[Tensor, Tensor]:
    """Return mean and precision of each weight, `(P,)`, or raise if the prior couples weights."""
    if not prior.is_factorized:
        raise ValueError(
            "the prior is one over all sites, the posterior of earlier data, and this takes a "
            "precision of each weight: do it on the first task, before update_prior"
        )
    return prior.loc, prior.precision.diagonal()


def with_precision(prior: Gaussian, given: PriorPrecision, prefix: str) -> Gaussian:
    """Return a prior with independent weights, with other precisions about the same means.

    `given` is one precision for all weights, or a number or a tensor of the site's shape for each
    site, by its name with or without the prefix. Coupled weights, or other names, are a ValueError.
    """
    loc, _ = independent_terms(prior)
    sites = {site.removeprefix(prefix): site for site in prior.blocks.sites}
    if not isinstance(given, Mapping):
        given = dict.fromkeys(sites, given)
    found = {sites.get(name, name): value for name, value in given.items()}
    if set(found) != set(sites.values()):
        raise ValueError(
            f"prior_precision is for {', '.join(given)}; expected a number for each of "
            f"{', '.join(sites)}"
        )
    values = {
        site: check.tensor("prior_precision", value, dtype=loc.dtype, device=loc.device)
        for site, value in found.items()
    }
    for site, mean in prior.blocks.unflatten(loc).items():
        if values[site].numel() != 1:
            check.shape(f"prior_precision of {site}", values[site], mean.shape, ", or a number")
    return Gaussian(prior.blocks, loc, prior.blocks.diagonal(prior.blocks.flatten(values)))


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
