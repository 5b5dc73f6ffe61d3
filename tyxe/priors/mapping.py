"""Priors of independent weights, and priors given parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import nn

from tyxe import check
from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli
from tyxe.priors.base import Prior, parameters_of
from tyxe.priors.sites import SitePrior
from tyxe.util import calculate_prior_std, layer_weight, resolve_site_name


class IIDPrior(Prior):
    """The same scalar distribution, independently for every weight.

    Args:
        distribution: a distribution over scalars, such as `dist.Normal(0, 1)`.
        rules: those of `Prior`, which choose the sites.

    Raises:
        TypeError: not a distribution.
        ValueError: not over scalars.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
        >>> sites = prior.sites(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> {name: tuple(site.event_shape) for name, site in sites.items()}
        {'0.weight': (8, 3, 3, 3), '0.bias': (8,)}
    """

    def __init__(self, distribution: td.Distribution, **rules: Any) -> None:
        super().__init__(**rules)
        check.one_of("distribution", distribution, td.Distribution, "one such as dist.Normal(0, 1)")
        shape = tuple(distribution.batch_shape + distribution.event_shape)
        if shape:
            raise ValueError(
                f"distribution has shape {shape}; IIDPrior takes one over scalars. For a "
                "distribution per parameter use DictPrior or LambdaPrior"
            )
        self.distribution = distribution

    def _arguments(self) -> str:
        return str(self.distribution)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self.distribution.expand(param.shape)


class LayerwiseNormalPrior(Prior):
    r"""Zero-mean Normals with the standard deviations of initialisation schemes.

    `radford`: `1 / sqrt(fan_in)`; `xavier`: `sqrt(2 / (fan_in + fan_out))`; `kaiming`:
    `gain / sqrt(fan_in)`. A bias has the fans of its layer.

    Args:
        method: `"radford"`, `"xavier"` or `"kaiming"`.
        nonlinearity: its gain is for `kaiming`; a name in `torch.nn.init.calculate_gain`.
        rules: those of `Prior`, which choose the sites.

    Raises:
        ValueError: an unknown method.

    Reference:
        [T] 5.1.1.2; Neal, Bayesian learning for neural networks, 1996.

    Example:
        >>> prior = LayerwiseNormalPrior("radford")
        >>> prior.sites(nn.Linear(25, 10))["bias"].base_dist.scale[0].item()
        0.20000000298023224
    """

    def __init__(self, method: str = "radford", nonlinearity: str = "relu", **rules: Any) -> None:
        super().__init__(**rules)
        calculate_prior_std(method, nn.Linear(1, 1).weight, nonlinearity=nonlinearity)
        self.method, self.nonlinearity = method, nonlinearity

    def _arguments(self) -> str:
        return repr(self.method)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        weight = layer_weight(module, name.rpartition(".")[2])
        std = calculate_prior_std(self.method, weight, module, self.nonlinearity)
        return dist.Normal(0.0, std).expand(param.shape)


class BinaryPrior(Prior):
    r"""Weights of two equally likely values, for `tyxe.guides.AutoBernoulli`.

    Args:
        delta: None for the plain prior, whose KL is `log 2` minus the posterior's entropy; a number
            for the Beta-Bernoulli regulariser, `-delta log pi (1 - pi)`, see `SignedBetaBernoulli`:
            a MAP objective in the probabilities, not a bound.
        scale: the values are `-scale` and `scale`: a number, or a layer-wise method of
            `LayerwiseNormalPrior`; `"radford"` is `1 / sqrt(fan_in)`, which has the same effect
            as multiplying every layer's output by it.
        rules: those of `Prior`. `expose_parameters=["weight"],
            hide_module_types=[nn.BatchNorm2d]` keeps biases and norms deterministic.

    Raises:
        ValueError: a negative delta, a scale that is not positive or an unknown method.

    Reference:
        [T] 4.1.

    Example:
        >>> prior = BinaryPrior(scale="radford", expose_parameters=["weight"])
        >>> prior.sites(nn.Linear(25, 10))["weight"].support.base_constraint
        Signs(0.2)
    """

    def __init__(self, delta: float | None = None, scale: float | str = 1.0, **rules: Any) -> None:
        super().__init__(**rules)
        self.delta, self.scale = delta, scale
        self._of_weight("weight", nn.Linear(1, 1))

    def _arguments(self) -> str:
        return f"delta={self.delta}, scale={self.scale!r}"

    def _of_weight(self, name: str, module: nn.Module) -> SignedBernoulli:
        scale = self.scale
        if isinstance(scale, str):
            weight = layer_weight(module, name.rpartition(".")[2])
            scale = calculate_prior_std(scale, weight, module)
        if self.delta is None:
            return SignedBernoulli(torch.zeros((), device="cpu"), scale)
        return SignedBetaBernoulli(self.delta, scale)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self._of_weight(name, module).expand(param.shape)


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
