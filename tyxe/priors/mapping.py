"""Priors of independent weights, parameter by parameter, and over single weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import singledispatch
from inspect import signature
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tyxe import check
from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli
from tyxe.priors.base import Parameter, Prior, parameters_of
from tyxe.priors.sites import SitePrior
from tyxe.rng import fresh_seed
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


_KNOWN = ("magnitude", "last", "random")
# Layers whose weights are gains, and not about zero.
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class SubnetworkPrior(Prior):
    """A prior over single weights, of those that another prior exposes; the others stay fixed.

    A site is the vector of a parameter's chosen weights, in the order of the flattened parameter,
    or the parameter itself if all of it is chosen. The other weights keep the values of the given
    net, so train it first. With few weights a posterior can couple all of them, whatever the size
    of the net: `LaplaceBNN(structure="full")`, HMC, a full-rank guide.

    Args:
        prior: the distributions of the chosen weights: any prior whose distributions have a
            tensor's shape.
        num_weights: number of random weights.
        by: which ones: a posterior, as `get_detached_distributions` returns it, for the largest
            marginal variances (`subnetwork` finds one); `"magnitude"` for the largest weights of
            the net, `"last"` for the last ones in the order of its parameters, or `"random"`.

    Raises:
        TypeError: not a prior, or another SubnetworkPrior.
        ValueError: an unknown `by`; fewer weights than 1. When applied to a net: more weights than
            the prior exposes; a posterior that lacks some of its sites.

    Reference:
        Daxberger et al., Bayesian deep learning via subnetwork inference, 2021.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> prior = SubnetworkPrior(tyxe.priors.IIDPrior(dist.Normal(0, 1)), 5, by="last")
        >>> {name: site.event_shape for name, site in prior.sites(nn.Linear(20, 1)).items()}
        {'weight': torch.Size([4]), 'bias': torch.Size([1])}
    """

    def __init__(
        self, prior: Prior, num_weights: int, by: str | Mapping[str, td.Distribution]
    ) -> None:
        self.prior = check.one_of("prior", prior, Prior, "one such as tyxe.priors.IIDPrior(...)")
        if isinstance(prior, SubnetworkPrior):
            raise TypeError(
                f"prior is {prior}, whose choice would be lost; expected a prior of whole tensors: "
                "choose once, among the weights that it exposes"
            )
        self.num_weights = check.count("num_weights", num_weights)
        if not isinstance(by, Mapping):
            hint = (
                ", or a posterior, whose variances are compared, which tyxe.priors.subnetwork(net, "
                "loader, num_weights, likelihood=...) finds itself"
            )
            check.choice("by", by, _KNOWN, hint)
        self.by, self.selection = by, prior.selection
        # The same weights whenever the prior is asked.
        self._seed = fresh_seed()

    def _arguments(self) -> str:
        by = self.by if isinstance(self.by, str) else "variance"
        return f"{self.prior}, {self.num_weights}, by={by!r}"

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> SitePrior:
        return self.prior.prior_dist(name, module, param)

    def elements(self, net: nn.Module) -> dict[str, Tensor]:
        parameters = self.selection.of(net)
        sizes = [parameter.tensor.numel() for parameter in parameters]
        hint = ", the weights that the prior exposes"
        check.count("num_weights", self.num_weights, hint=hint, most=sum(sizes))
        is_chosen = torch.zeros(sum(sizes), dtype=torch.bool, device="cpu")
        is_chosen[self._scores(parameters, sum(sizes)).topk(self.num_weights).indices] = True
        named = zip(parameters, is_chosen.split(sizes), strict=True)
        return {p.name: part.nonzero()[:, 0] for p, part in named if not part.all()}

    def _scores(self, parameters: list[Parameter], size: int) -> Tensor:
        """Return numbers by which weights are compared, `(size,)`, on the CPU."""
        if self.by == "last":
            return torch.arange(size, device="cpu")
        if self.by == "random":
            generator = torch.Generator().manual_seed(self._seed)
            return torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        named = ((p.name, p.tensor.detach()) for p in parameters)
        by_size = self.by == "magnitude"
        found = (tensor.abs() if by_size else self._variance(n, tensor) for n, tensor in named)
        return torch.cat([scores.flatten().cpu() for scores in found])

    def _variance(self, name: str, tensor: Tensor) -> Tensor:
        posterior: Any = self.by
        variance = posterior[resolve_site_name(name, posterior)].variance
        return check.shape(f"the variance of {name!r}", variance, tensor.shape)


@check.arguments
def subnetwork(
    net: nn.Module,
    loader: Iterable[Any] | None,
    num_weights: int,
    by: str = "variance",
    *,
    prior: Prior | None = None,
    likelihood: Any = None,
) -> SubnetworkPrior:
    """Return a prior over single weights of a trained net, whose others stay fixed.

    Args:
        net: the trained net, which is not changed.
        loader: for `"variance"`, yields `(inputs, targets)`, or with weights; otherwise not read.
        num_weights: number of random weights.
        by: which ones: `"variance"`, those of the largest marginal variances under a diagonal
            Laplace approximation; or `"magnitude"`, `"last"` or `"random"`, see `SubnetworkPrior`.
        prior: the distributions of the weights; by default standard Normals of all that are in no
            normalisation layer.
        likelihood: for `"variance"`, the likelihood, whose `dataset_size` scales the curvature.

    Raises:
        TypeError: no likelihood for `"variance"`; a prior that is a SubnetworkPrior.
        ValueError: an unknown `by`; fewer weights than 1, or more than the prior exposes; for
            `"variance"`, a prior that is not Gaussian, or data that do not fit the likelihood.

    Example:
        >>> import tyxe
        >>> net, x = nn.Linear(20, 3), torch.randn(40, 20)
        >>> loader, likelihood = [(x, torch.arange(40) % 3)], tyxe.likelihoods.Categorical(40)
        >>> prior = subnetwork(net, loader, 30, likelihood=likelihood)
        >>> bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure="full")
        >>> bnn.fit_curvature(loader)
        >>> bnn.net_guide.precision.size
        30
    """
    check.choice("by", by, ("variance", *_KNOWN))
    prior = prior or IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=_NORMS)
    found = SubnetworkPrior(prior, num_weights, "last" if by == "variance" else by)
    found.elements(net)  # too many weights are refused before the work
    if by != "variance":
        return found
    return SubnetworkPrior(prior, num_weights, diagonal_posterior(likelihood, net, prior, loader))


@singledispatch
def diagonal_posterior(
    likelihood: Any, net: nn.Module, prior: Prior, loader: Any
) -> Mapping[str, td.Distribution]:
    """Return a posterior of independent weights; `tyxe.bnn`, which is above, registers it."""
    raise TypeError(
        f'likelihood is {check.described(likelihood)}; by="variance" needs that of the net, for '
        "the curvature: likelihood=tyxe.likelihoods.Categorical(len(data)), or such"
    )
