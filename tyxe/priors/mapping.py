"""Priors given parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch.distributions as td
from torch import nn

from tyxe import check
from tyxe.priors.base import Prior
from tyxe.priors.selection import parameters_of
from tyxe.priors.sites import SitePrior
from tyxe.util import resolve_site_name


class DictPrior(Prior):
    """A distribution for each parameter, by name: how a posterior becomes the next prior.

    Args:
        dist_dict: distributions by the parameter's name in the net, or with `net.` before it.
        rules: those of `Prior`, which choose the sites.

    Raises:
        TypeError: not a mapping.
        ValueError: when applied to a net: a parameter has no entry, an entry has another shape, or
            an entry names neither a site of the net nor a parameter that the rules hide.

    Example:
        >>> import pyro.distributions as dist
        >>> normal = dist.Normal(0, 1)
        >>> normals = {"weight": normal.expand([1, 2]), "bias": normal.expand([1])}
        >>> list(DictPrior(normals).sites(nn.Linear(2, 1)))
        ['weight', 'bias']
    """

    def __init__(self, dist_dict: Mapping[str, td.Distribution], **rules: Any) -> None:
        super().__init__(**rules)
        check.one_of("dist_dict", dist_dict, Mapping, "distributions by name")
        self.dist_dict = dict(dist_dict)

    def _arguments(self) -> str:
        return f"{len(self.dist_dict)} distributions"

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        try:
            return self.dist_dict[resolve_site_name(name, self.dist_dict)]
        except ValueError:
            raise ValueError(
                f"the prior has no entry for {name!r}; it has {', '.join(self.dist_dict)}. "
                f"Add one, or hide the parameter: DictPrior(..., hide=[{name!r}])"
            ) from None

    def _check_entries(self, net: nn.Module, sites: Iterable[str]) -> None:
        known = list(sites)
        if not (others := [entry for entry in self.dist_dict if not _names_one(entry, known)]):
            return
        # Entries for parameters that the prior's own rules hide are allowed.
        exposed = {parameter.name for parameter in self.selection.of(net)} - set(known)
        aside = [n for p in parameters_of(net) if p.name not in exposed for n in p.names]
        for entry in others:
            if not _names_one(entry, aside):
                raise ValueError(
                    f"the prior has an entry for {entry!r}, but the sites of the net are "
                    f"{', '.join(known) or 'none'}: take the posterior of a net with the same "
                    "sites, or leave the entry out"
                )


def _names_one(entry: str, known: list[str]) -> bool:
    try:
        resolve_site_name(entry, known)
    except ValueError:
        return False
    return True


class LambdaPrior(Prior):
    """A distribution for each parameter, by a function.

    Args:
        fn: `fn(name, module, param)` returns a distribution of the parameter's shape, or a
            function without arguments that makes Pyro statements and returns one: a hierarchical
            prior. Names of its own statements get the net's prefix.
        rules: those of `Prior`, which choose the sites.

    Raises:
        TypeError: not a function of three arguments.

    Example:
        A horseshoe, whose local scales are sites of the model too:

        >>> import pyro, pyro.distributions as dist
        >>> def horseshoe(name, module, param):
        ...     def prior():
        ...         local = dist.HalfCauchy(param.new_ones(param.shape)).to_event(param.dim())
        ...         return dist.Normal(0, pyro.sample(f"{name}_local", local))
        ...     return prior
        >>> net = nn.Linear(2, 1)
        >>> LambdaPrior(horseshoe, hide_parameters=["bias"]).apply_(net)
        >>> from tyxe.util import pyro_sample_sites
        >>> pyro_sample_sites(net)
        ['weight']
    """

    def __init__(
        self, fn: Callable[[str, nn.Module, nn.Parameter], SitePrior], **rules: Any
    ) -> None:
        super().__init__(**rules)
        check.function("fn", fn, "a function of (name, module, param)")
        try:
            signature(fn).bind("", None, None)
        except TypeError:
            raise TypeError(
                f"fn takes {signature(fn)}; expected a function of (name, module, param)"
            ) from None
        self.fn = fn

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> SitePrior:
        return self.fn(name, module, param)
