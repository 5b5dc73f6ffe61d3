"""Pruning of a fitted guide, which may be fitted further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.guides.inducing import AutoInducing
from tyxe.guides.normal import AutoNormal
from tyxe.util import SiteTensors


def prune_(guide: AutoNormal, keep: float) -> None:
    r"""Fix the weights with the smallest `|mean| / sd` of a mean field at zero, biases excepted.

    The masks stay fixed in further fits, which need a new optimiser. They are part of the
    `state_dict`; a new guide loads it after `prune_(guide, keep=1.0)`.

    Args:
        guide: changed in place.
        keep: share to keep of all elements of weights of two dimensions or more.

    Raises:
        TypeError: another kind of guide.
        ValueError: a share outside (0, 1], or larger than an earlier call has left.

    Reference:
        Graves, Practical variational inference for neural networks, 2011, 5.4; [T] 4.2.4.8.

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> bnn = tyxe.VariationalBNN(
        ...     nn.Linear(10, 2), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), AutoNormal)
        >>> prune_(bnn.net_guide, keep=0.1)
        >>> int((bnn.net_guide.posterior()["net.weight"].variance > 0).sum())
        2
    """
    check.one_of("guide", guide, AutoNormal, "tyxe.guides.AutoNormal")
    sites = [s for s in guide.sites if s.is_real and len(s.shape) > 1]
    ratios = {s.own_name: guide.get_loc(s.name).abs() / guide.get_scale(s.name) for s in sites}
    _prune([(ratios, guide.locs, guide.kept)], keep)


def prune_inducing_(guide: AutoInducing, keep: float) -> None:
    r"""Drop the entries of the maps `Z_r`, `Z_c` of smallest magnitude.

    Masks are kept as `prune_` keeps them.

    Args:
        guide: changed in place.
        keep: share of all entries to keep.

    Raises:
        TypeError: another kind of guide.
        ValueError: a share outside (0, 1], or larger than an earlier call has left.

    Reference:
        [T] 4.2.4.8.

    Example:
        >>> import functools, tyxe, pyro.distributions as dist
        >>> bnn = tyxe.VariationalBNN(
        ...     nn.Linear(50, 40), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1),
        ...     functools.partial(AutoInducing, inducing_rows=4, inducing_cols=4))
        >>> before = parameter_count(bnn.net_guide)
        >>> prune_inducing_(bnn.net_guide, keep=0.5)
        >>> before - parameter_count(bnn.net_guide)  # half of 4 * 40 + 4 * 51
        182
    """
    check.one_of("guide", guide, AutoInducing, "tyxe.guides.AutoInducing")
    sides = (guide.row_maps, guide.kept_rows), (guide.column_maps, guide.kept_columns)
    _prune([({n: z.abs() for n, z in maps.items()}, maps, kept) for maps, kept in sides], keep)


@check.arguments
def parameter_count(guide: nn.Module) -> int:
    """Return the number of a guide's parameters that have to be stored after pruning.

    A pruned weight of a mean field reduces it by two (mean and standard deviation), a pruned entry
    of a map by one. Any module can be counted.
    """
    total = sum(parameter.numel() for parameter in guide.parameters())
    for part in guide.modules():
        if isinstance(part, AutoNormal):
            total -= 2 * _dropped(part.kept)
        elif isinstance(part, AutoInducing):
            total -= _dropped(part.kept_rows) + _dropped(part.kept_columns)
    return total


def _dropped(kept: SiteTensors) -> int:
    return sum(int((~mask).sum()) for _, mask in kept.items())


Part = tuple[Mapping[str, Tensor], SiteTensors, SiteTensors]


@torch.no_grad()
def _prune(parts: Sequence[Part], keep: float) -> None:
    """Keep the share of highest-scoring elements, and set the others of the tensors to zero."""
    keep = check.number("keep", keep, above=0, most=1, hint=", the share that is left")
    scores = [
        # Below every score, so that pruned elements stay pruned.
        torch.where(kept[name], score, -1.0) if name in kept else score
        for part, _, kept in parts
        for name, score in part.items()
    ]
    hint = ": the guide has no weights of two dimensions or more, which alone are pruned"
    check.count("the number of sites to prune", len(scores), hint=hint)
    flat = torch.cat([score.reshape(-1) for score in scores])
    count, left = round(keep * len(flat)), int((flat >= 0).sum())
    hint = f", the elements that are left of {len(flat)}"
    check.count(f"what keep={keep} keeps", count, hint=hint, most=left)
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(count, sorted=False).indices] = True
    chosen = iter(mask.split([score.numel() for score in scores]))
    for part, tensors, kept in parts:
        for name, score in part.items():
            kept.put(name, next(chosen).view(score.shape))
            tensors[name].mul_(kept[name])
