"""Prior precisions as a caller gives them, and the search for those of most evidence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from tyxe.bnn.batches import batches_of
from tyxe.bnn.evidence import logdet_of_numbers
from tyxe.errors import TyxeWarning
from tyxe.linalg import NotPositiveDefiniteError
from tyxe.priors import DictPrior

__all__ = [
    "PriorPrecision",
    "check_numbers",
    "maximize_evidence",
    "maximize_held_out",
    "most_evidence",
    "spread",
]

PriorPrecision = float | Tensor | Mapping[str, float | Tensor]


def spread(given: PriorPrecision, like: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return a precision for each site: a number, or one for each weight.

    Args:
        given: one for all, or by site, in either spelling.
        like: tensors of the sites' shapes, by joint name.
        prefix: of the joint names.

    Raises:
        ValueError: a site has no entry.
    """
    found = {}
    for name, tensor in like.items():
        value = given
        if isinstance(given, Mapping):
            key = name if name in given else name.removeprefix(prefix)
            if key not in given:
                raise ValueError(
                    f"prior_precision has no entry for {key!r}; it has {', '.join(given)}"
                )
            value = given[key]
        number = torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)
        found[name] = number.expand(tensor.shape) if number.dim() else number
    return found


def most_evidence(
    owner: Mapping[str, str],
    squared_deviations: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    logdet: Callable[[Mapping[str, Tensor]], Tensor],
    num_steps: int,
) -> dict[str, Tensor]:
    r"""Return the precisions that maximise the evidence with the mode held.

    Where the evidence is flat, `d = gamma / |w* - m0|^2`, with `gamma = P - d tr Lambda^-1` the
    number of weights that the data determine (MacKay 1992, eq. 4.9). As `log gamma` falls in
    `log d`, at a slope above -1, there is one such `d`, and half a step towards the right-hand side
    in the logarithm, at least halves the distance to it, from wherever it starts.

    Args:
        owner: for each site the name of its precision.
        squared_deviations: `(w* - m0)^2` of each weight, by site.
        start: where to start: the prior's precision of each weight, by site.
        logdet: of the posterior's precision, as a function of the precisions by name.
        num_steps: at most; it ends as soon as a step is below the square root of the rounding.
    """
    sites = {key: [s for s in owner if owner[s] == key] for key in owner.values()}
    sums = torch.stack(
        [torch.stack([squared_deviations[s].sum() for s in each]).sum() for each in sites.values()]
    )
    if bool((sums == 0).any()):
        at_mean = [key or "the net" for key, total in zip(sites, sums, strict=True) if total == 0]
        warnings.warn(
            f"the weights of {', '.join(at_mean)} are at the prior's mean, where the evidence "
            "grows with the precision without end: theirs is left as it was; fit the net first",
            TyxeWarning,
            stacklevel=4,
        )
    starts = [torch.stack([start[s].log().mean() for s in each]).mean() for each in sites.values()]
    logs = torch.stack(starts).detach()
    sizes = logs.new_tensor(
        [sum(squared_deviations[s].numel() for s in each) for each in sites.values()]
    )
    rounding = torch.finfo(logs.dtype).eps
    for _ in range(num_steps):
        at = logs.clone().requires_grad_()
        total = logdet(dict(zip(sites, at.exp().unbind(), strict=True)))
        (slopes,) = torch.autograd.grad(total, at)
        # What rounding has left of it may be nothing.
        determined = torch.maximum(sizes - slopes, rounding * sizes)
        step = torch.where(sums > 0, (determined / sums).log() - logs, 0.0) / 2
        logs = logs + step
        if not bool((step.abs() > rounding**0.5).any()):
            break
    else:
        warnings.warn(
            f"the prior's precision has not converged in num_steps={num_steps}: its logarithm "
            f"still moves by {float(step.abs().max()):.1g}; take more",
            TyxeWarning,
            stacklevel=4,
        )
    return dict(zip(sites, logs.exp(), strict=True))


def check_numbers(bnn: Any) -> None:
    """Raise unless the prior of each site has one precision, which another may replace.

    Args:
        bnn: a `LaplaceBNN`.

    Raises:
        ValueError: a site's weights have precisions of their own.
    """
    for name, precision in bnn._prior_moments()[1].items():
        if not bool((precision == precision.flatten()[0]).all()):
            raise ValueError(
                f"the prior of {name!r} has a precision for each weight, as a posterior has that "
                "became the prior, and one number would forget them: choose it on the first task, "
                "before update_prior"
            )


def maximize_evidence(bnn: Any, per_site: bool, num_steps: int) -> Tensor | dict[str, Tensor]:
    """Find the precision of most evidence, and make it the prior's.

    Args:
        bnn: a `LaplaceBNN` with a curvature, like all that follow.
        per_site: a precision for each weight and its bias, instead of one for all.
        num_steps: at most, towards it.

    Returns:
        The precision; `per_site`, one for each weight, by its name in the net.
    """
    check_numbers(bnn)
    curvature = bnn.net_guide.curvature
    owner = {site: g.name if per_site else "" for g in curvature.groups for site in g.sites}
    logdet = logdet_of_numbers(curvature, owner, bnn._curvature_temperature, bnn.damping)
    precisions = bnn._prior_moments()[1]
    found = most_evidence(owner, bnn._squared_deviations(), precisions, logdet, num_steps)
    _set_precision(bnn, {site: found[key] for site, key in owner.items()})
    prefix = bnn.net_prior.prefix
    by_name = {key.removeprefix(prefix): value for key, value in found.items()}
    return by_name if per_site else found[""]


def maximize_held_out(bnn: Any, loader: Iterable[Any], grid: Iterable[float] | None) -> Tensor:
    """Find the precision of the best held-out log-likelihood, and make it the prior's.

    Args:
        bnn: as in `maximize_evidence`.
        loader: of held-out data.
        grid: precisions to try; by default 21 from 1e-4 to 1e4.

    Raises:
        ValueError: no precision has a finite score; the prior then stays as it was.
    """
    check_numbers(bnn)
    candidates = torch.logspace(-4, 4, 21).tolist() if grid is None else [float(p) for p in grid]
    if not candidates or not all(0 < precision < math.inf for precision in candidates):
        raise ValueError(f"grid is {candidates}; expected positive numbers, one at least")
    prior, priors = bnn.prior, bnn.net_prior.snapshot()
    try:
        scores = {precision: _held_out(bnn, precision, loader) for precision in candidates}
        finite = {p: score for p, score in scores.items() if math.isfinite(score)}
        if not finite:
            raise ValueError("no precision of the grid gives a finite held-out log-likelihood")
    except BaseException:
        bnn.prior = prior
        bnn.net_prior.restore(priors)
        bnn._refresh()
        raise
    like = next(iter(bnn._prior_moments()[1].values()))
    best = like.new_tensor(max(finite, key=finite.__getitem__))
    _set_precision(bnn, dict.fromkeys(bnn.site_names(), best))
    return best


def _held_out(bnn: Any, precision: float, loader: Iterable[Any]) -> float:
    """The log-likelihood of held-out data, from the same random numbers every time."""
    device = next(bnn.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            _set_precision(bnn, dict.fromkeys(bnn.site_names(), torch.tensor(precision)))
            return sum(float(bnn.evaluate(x, y)[1]) for x, y in batches_of(loader, device))
        except NotPositiveDefiniteError:
            return -math.inf  # below what rounding has left of the curvature


def _set_precision(bnn: Any, precisions: Mapping[str, Tensor]) -> None:
    """Give the prior other precisions, and leave its means."""
    means, before = bnn._prior_moments()
    prefix = bnn.net_prior.prefix
    scales = {name: precisions[name].to(before[name]).rsqrt() for name in before}
    bnn.update_prior(
        DictPrior(
            {
                name.removeprefix(prefix): dist.Normal(
                    means[name], scales[name].expand(means[name].shape)
                ).to_event(means[name].dim())
                for name in before
            }
        )
    )
