"""Prior precisions as a caller gives them, and the search for those of most evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from tyxe.bnn.batches import batches_of
from tyxe.bnn.evidence import logdet_of_numbers
from tyxe.priors import DictPrior

__all__ = ["PriorPrecision", "ascent", "maximize_evidence", "maximize_held_out", "spread"]

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


def ascent(
    owner: Mapping[str, str],
    squared_deviations: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    logdet: Callable[[Mapping[str, Tensor]], Tensor],
    num_steps: int,
    lr: float,
) -> dict[str, Tensor]:
    """Return the precisions that maximise the evidence, by gradient ascent on their logarithms.

    Args:
        owner: for each site the name of its precision.
        squared_deviations: `(w* - m0)^2` of each weight, by site.
        start: where to start: the prior's precision of each weight, by site.
        logdet: of the posterior's precision, as a function of the precisions by name.
        num_steps: of Adam.
        lr: its learning rate.
    """
    sites = {key: [s for s in owner if owner[s] == key] for key in owner.values()}
    sums = torch.stack(
        [torch.stack([squared_deviations[s].sum() for s in each]).sum() for each in sites.values()]
    )
    starts = [torch.stack([start[s].log().mean() for s in each]).mean() for each in sites.values()]
    logs = torch.stack(starts).detach().requires_grad_()
    sizes = logs.new_tensor(
        [sum(squared_deviations[s].numel() for s in each) for each in sites.values()]
    )
    optimizer = torch.optim.Adam([logs], lr=lr, maximize=True)
    for _ in range(num_steps):
        optimizer.zero_grad()
        numbers = logs.exp()
        # What of the evidence depends on the precision: its other terms stay as they are.
        penalty = (numbers * sums - sizes * logs).sum()
        by_key = dict(zip(sites, numbers.unbind(), strict=True))
        (-(penalty + logdet(by_key)) / 2).backward()
        optimizer.step()
    return dict(zip(sites, logs.detach().exp(), strict=True))


def maximize_evidence(
    bnn: Any, per_site: bool, num_steps: int, lr: float
) -> Tensor | dict[str, Tensor]:
    """Find the precision of most evidence, and make it the prior's.

    Args:
        bnn: a `LaplaceBNN` with a curvature, like all that follow.
        per_site: a precision for each weight and its bias, instead of one for all.
        num_steps: of the ascent.
        lr: of the ascent.

    Returns:
        The precision; `per_site`, one for each weight, by its name in the net.
    """
    curvature = bnn.net_guide.curvature
    owner = {site: g.name if per_site else "" for g in curvature.groups for site in g.sites}
    logdet = logdet_of_numbers(curvature, owner, bnn._curvature_temperature, bnn.damping)
    precisions = bnn._prior_moments()[1]
    found = ascent(owner, bnn._squared_deviations(), precisions, logdet, num_steps, lr)
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
    candidates = torch.logspace(-4, 4, 21).tolist() if grid is None else map(float, grid)
    before = bnn.prior
    try:
        scores = {precision: _held_out(bnn, precision, loader) for precision in candidates}
        finite = {p: score for p, score in scores.items() if math.isfinite(score)}
        if not finite:
            raise ValueError("no precision of the grid gives a finite held-out log-likelihood")
    except BaseException:
        bnn.update_prior(before)
        raise
    like = next(iter(bnn._prior_moments()[1].values()))
    best = like.new_tensor(max(finite, key=finite.__getitem__))
    _set_precision(bnn, dict.fromkeys(bnn.site_names(), best))
    return best


def _held_out(bnn: Any, precision: float, loader: Iterable[Any]) -> float:
    """The log-likelihood of held-out data, from the same random numbers every time."""
    _set_precision(bnn, dict.fromkeys(bnn.site_names(), torch.tensor(precision)))
    device = next(bnn.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return sum(float(bnn.evaluate(x, y)[1]) for x, y in batches_of(loader, device))


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
