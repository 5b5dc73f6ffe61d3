"""Prior precisions as a caller gives them, and those that maximise the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["PriorPrecision", "ascent", "spread"]

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
