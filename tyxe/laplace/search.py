"""The search for the prior precision of largest evidence, or of the best held-out score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from tyxe import check
from tyxe.distributions import Gaussian
from tyxe.errors import warn
from tyxe.laplace.precision import independent_terms, with_precision
from tyxe.laplace.state import LaplaceState
from tyxe.linalg import BlockDiagonal, Diagonal, Kronecker, LowRank, Operator
from tyxe.linalg.kronecker import is_one_number

# From which on the evidence of classes gives a warning: weights determined for each target, and the
# log-likelihood of one. docs/laplace.md, under evidence, has what is on either side.
MANY, CERTAIN = 0.15, -0.1

# From prior precisions by name to the log-determinant of the posterior's precision.
Logdet = Callable[[Mapping[str, Tensor]], Tensor]


def check_one_number(prior: Gaussian) -> None:
    """Raise a ValueError unless the weights of each site have one prior precision."""
    _, precision = independent_terms(prior)
    for site, value in prior.blocks.unflatten(precision).items():
        if not is_one_number(value.flatten()):
            raise ValueError(
                f"the prior of {site!r} has a precision for each weight, as a posterior has that "
                "became the prior, and one number would forget them: choose it on the first task, "
                "before update_prior"
            )


def with_numbers(state: LaplaceState, numbers: Mapping[str, Tensor]) -> Gaussian:
    """Return a state's prior with a precision for each block, or one for all under `""`."""
    owners = {site: block.name for block in state.blocks for site in block.sites}
    given = {site: numbers[name if name in numbers else ""] for site, name in owners.items()}
    return with_precision(state.prior, given, "")


def most_evidence(state: LaplaceState, per_block: bool, num_steps: int) -> dict[str, Tensor]:
    """Return the precisions that maximise the evidence, with the mode held fixed.

    At the maximum `d = gamma / |w* - m0|^2`, where `gamma = P - d tr Lambda^-1` is the number of
    weights that the data determine (MacKay 1992, eq. 4.9). The slope of `log gamma` in `log d` is
    between -1 and 0, so there is one such `d`, and half a step of `log d` towards the right-hand
    side at least halves the distance to it, from any start.

    The state's prior has one precision for each site. The result has one for each block, such as
    weight and bias of a layer, by its name, or one for all under `""`. Weights at the prior's mean,
    and steps that have not converged, give a warning.
    """
    names, sizes = [block.name if per_block else "" for block in state.blocks], state.blocks.sizes
    keys = list(dict.fromkeys(names))
    mean, precision = independent_terms(state.prior)
    squares = (state.loc - mean).square()
    owner = torch.tensor([keys.index(name) for name in names], device=squares.device)

    def total(of_blocks: Iterable[Tensor]) -> Tensor:
        each = torch.stack(list(of_blocks))
        return each.new_zeros(len(keys)).index_add(0, owner, each)

    sums = total(part.sum() for part in squares.split(sizes))
    counts = total(squares.new_tensor(float(size)) for size in sizes)
    logs = total(part.log().sum() for part in precision.split(sizes)) / counts
    if bool((sums == 0).any()):
        at_mean = [key or "the net" for key, square in zip(keys, sums, strict=True) if square == 0]
        warn(
            f"the weights of {', '.join(at_mean)} are at the prior's mean, where the evidence "
            "grows with the precision without end: theirs is left as it was; fit the net first",
        )
    logdet, rounding = _logdet(state, names), torch.finfo(logs.dtype).eps
    for _ in range(num_steps):
        at = logs.clone().requires_grad_()
        with torch.enable_grad():
            value = logdet(dict(zip(keys, at.exp().unbind(), strict=True)))
        (slopes,) = torch.autograd.grad(value, at)
        # By rounding, the difference may be zero or negative.
        determined = torch.maximum(counts - slopes, rounding * counts)
        step = torch.where(sums > 0, (determined / sums).log() - logs, 0.0) / 2
        logs = logs + step
        if not bool((step.abs() > rounding**0.5).any()):
            break
    else:
        warn(
            f"the prior's precision has not converged in num_steps={num_steps}: its logarithm "
            f"still moves by {float(step.abs().max()):.1g}; take more",
        )
    return dict(zip(keys, logs.exp(), strict=True))


def warn_of_certainty(state: LaplaceState) -> None:
    """Warn if the evidence would make a net that is certain of its training data unsure.

    What such a net has learned leaves hardly any curvature, `p (1 - p)`. At the maximum, the number
    of weights that data determine is `gamma = sum_p d_p (w*_p - m0_p)^2` [MacKay 1992, eq. 4.9].
    """
    targets, likelihood = state.curvature.num_targets, state.curvature.log_likelihood
    mean, precision = independent_terms(state.prior)
    share = float((precision * (state.loc - mean).square()).sum()) / targets
    if share > MANY and likelihood / targets > CERTAIN:
        certain = math.exp(likelihood / targets)
        warn(
            f"by the evidence, {share:.2f} weights are determined for each target, by a net that "
            f"gives them a probability of {certain:.3f}: predictions will be less certain than "
            "they should. Choose the precision by held-out data, "
            "optimize_prior_precision(loader=held_out), or compare log-likelihoods there"
        )


def _logdet(state: LaplaceState, names: list[str]) -> Logdet:
    """Return `log det Lambda` as a function of prior precisions, `names` being that of each block.

    Where `Lambda` is `lambda G / T` plus a multiple of the identity in each block, the eigenvalues
    of `G` are computed once.
    """
    operators = state.curvature.operator.blocks
    whole = list(operators) == ["all"]
    if state.damping or (whole and len(set(names)) > 1):
        return lambda numbers: (
            state.replace(prior=with_numbers(state, numbers)).precision().logdet()
        )
    spectra: dict[str, list[Tensor]] = {name: [] for name in names}
    for name, operator in zip(names, operators.values(), strict=False):
        spectra[name].append(spectrum(operator) * state.weight)
    together = {name: torch.cat(parts) for name, parts in spectra.items()}

    def logdet(numbers: Mapping[str, Tensor]) -> Tensor:
        parts = [(together[name] + number).log().sum() for name, number in numbers.items()]
        return torch.stack(parts).sum()

    return logdet


def spectrum(operator: Operator) -> Tensor:
    """Return all eigenvalues, `(P,)`."""
    if isinstance(operator, Kronecker):
        return operator.eigenvalues.flatten()
    if isinstance(operator, BlockDiagonal):
        return torch.cat([spectrum(part) for part in operator.blocks.values()])
    if isinstance(operator, Diagonal):
        return operator.diagonal()
    if isinstance(operator, LowRank) and not bool(operator.entries.any()):  # as of curvatures
        known: Tensor = torch.linalg.eigvalsh(operator.factor.mT @ operator.factor).clamp_min(0)
        return torch.cat([operator.entries[: operator.size - len(known)], known])
    values: Tensor = torch.linalg.eigvalsh(operator.to_dense().double())
    return values.clamp_min(0).to(operator.dtype)


def best_of_grid(grid: Iterable[float] | None, score: Callable[[float], float]) -> float:
    """Return the precision of the largest finite score; the default grid is 21 from 1e-4 to 1e4."""
    given = torch.logspace(-4, 4, 21, device="cpu").tolist() if grid is None else grid
    candidates = [check.number("a precision of the grid", each, above=0) for each in given]
    scores = {precision: score(precision) for precision in candidates}
    finite = {p: found for p, found in scores.items() if math.isfinite(found)}
    if not finite:
        raise ValueError("no precision of the grid gives a finite held-out log-likelihood")
    best = max(finite, key=finite.__getitem__)
    if grid is None and best == candidates[-1]:
        warn(
            f"the best precision, {best:g}, is the largest of the grid, so the posterior has "
            "hardly any width: the net is not too sure of these data, so a posterior does not help "
            "their log-likelihood (or it was trained on them); a temperature may help"
        )
    elif grid is None and best == candidates[0]:
        warn(
            f"the best precision, {best:g}, is the smallest of the grid, so the prior hardly "
            "counts: the net is much too sure of these data; pass grid= with smaller ones"
        )
    return best
