"""Pyro guides as parts of a BNN."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDelta,
    AutoDiagonalNormal,
    AutoGaussian,
    AutoGuide,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message
from torch import Tensor, nn

from tyxe import check
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.distributions.normal import Point
from tyxe.guides.base import AnyGuide, Guide, on_support, sites_of
from tyxe.guides.init import init_to_net
from tyxe.linalg import Cholesky, Inverse, LowRank, Operator
from tyxe.rng import torch_rng_kept
from tyxe.threads import module_local_params, only_handlers
from tyxe.util import unwrapped

T = TypeVar("T", bound=nn.Module)

# Pyro's guides that draw a site with others.
_COUPLED = AutoContinuous, AutoStructured, AutoGaussian


def _is_auto(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, AutoGuide | GuideMessenger)


def _starting_at_net(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Let one of Pyro's autoguides start at the net, as ours do, unless it is given a start."""
    kind, given = unwrapped(builder)
    if not _is_auto(kind) or "init_loc_fn" in given:
        return builder
    start = inspect.signature(kind).parameters.get("init_loc_fn")
    used = start is not None and callable(start.default)
    return functools.partial(builder, init_loc_fn=init_to_net) if used else builder


def _has_part_of_each(builder: Callable[..., Any]) -> bool:
    """Whether a builder is an autoguide with parameters for each site, by the site's name."""
    kind = unwrapped(builder)[0]
    return _is_auto(kind) and not issubclass(kind, AutoContinuous)


class _Renamed(Messenger):
    """Gives sites other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def _pyro_sample(self, msg: Message) -> None:
        name = msg["name"].removesuffix(_AUXILIARY)
        msg["name"] = self._names.get(name, name) + msg["name"].removeprefix(name)


# Pyro's AutoNormal draws such a site for each of its own.
_AUXILIARY = "_unconstrained"


def _kept_apart(module: Callable[..., Any]) -> dict[str, str]:
    """Return other names for sites that cannot be attributes of a module with the others.

    Autoguides keep a parameter `weight`, and that of a site `weight.scale` would be an attribute of
    it.
    """
    with torch_rng_kept(), only_handlers(()):
        nodes = poutine.trace(module).get_trace().nodes.items()
    sites = {name for name, node in nodes if node["type"] == "sample"}
    found: dict[str, str] = {}
    for name in sites:
        *parts, last = name.split(".")
        if any(".".join(parts[:count]) in sites for count in range(1, len(parts) + 1)):
            found[name] = "_of_".join([last, "_".join(parts)])
            while found[name] in sites:
                found[name] += "_"
    return found


class PyroGuide(AnyGuide):
    """A Pyro autoguide, or any module that is a Pyro guide, as a part of a BNN.

    The guide is set up at once, without data. Its parameters live in the module and not in Pyro's
    global store, because each call runs under `module_local_params`. A BNN puts the result of its
    `net_guide_builder` into this class unless it is a `Guide`.

    Args:
        guide: the guide, built on `module`.
        module: the program that samples the sites from their prior.

    Raises:
        ValueError: the guide draws a site in another dtype.

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoDelta
        >>> bnn = tyxe.VariationalBNN(
        ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), AutoDelta)  # MAP
        >>> sorted(bnn.net_guide.median())
        ['net.bias', 'net.weight']
    """

    @classmethod
    def build(
        cls, builder: Callable[[Callable[..., Any]], Any], module: Callable[..., Any]
    ) -> Guide | PyroGuide:
        """Call a guide's builder on a program, and wrap the guide unless it is a `Guide`.

        Raises:
            TypeError: the builder did not return a module, or lacks arguments. The `pyro.param` of
                a function would be in Pyro's global store, where no BNN trains it.
            ValueError: the guide does not take the sites.
        """
        expected = (
            "a class of guides, such as tyxe.guides.AutoNormal, or a functools.partial of one, "
            "which the BNN calls"
        )
        check.function("the guide's builder", builder, expected)
        kind, _ = unwrapped(builder)
        if isinstance(kind, type) and issubclass(kind, (*_COUPLED, AutoDelta, AutoNormal)):
            with torch_rng_kept():
                sites_of(module)  # which says of a discrete one what to take
        names = _kept_apart(module) if _has_part_of_each(builder) else {}
        program = _Renamed(names)(module) if names else module
        with module_local_params(), only_handlers(()):
            guide = _starting_at_net(builder)(program)
        if isinstance(guide, MCMCKernel):
            raise TypeError(f"{type(guide).__name__} is a kernel; use it with tyxe.MCMC_BNN")
        if isinstance(guide, Guide | PyroGuide):
            return _with_own_memory(guide)
        expected = (
            "a module that holds its parameters, as tyxe.guides.AutoNormal, a class from "
            "pyro.infer.autoguide, or a PyroModule of your own does"
        )
        check.one_of("what the guide's builder returned", guide, nn.Module, expected)
        with module_local_params():
            return _with_own_memory(cls(guide, module, names))

    def __init__(
        self,
        guide: nn.Module,
        module: Callable[..., Any],
        names: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.guide = guide
        self.sites, _ = sites_of(module, takes_discrete=True)
        self._own = {other: name for name, other in (names or {}).items()}
        with only_handlers(()), module_local_params():
            draws, sites = self._named(self.guide()), module()
        for name, value in sites.items() if isinstance(sites, Mapping) else ():
            if name in draws and draws[name].dtype != value.dtype:
                raise ValueError(
                    f"{type(guide).__name__} draws {name!r} in {draws[name].dtype}, which is in "
                    f"{value.dtype}; use another guide, such as tyxe.guides.AutoNormal, or a net "
                    f"in {draws[name].dtype}"
                )
            if name in draws and draws[name].device != value.device:
                self.guide.to(value.device)  # such as Pyro's flows, which are made on the CPU

    @property
    def has_spread(self) -> bool:
        return not isinstance(self.guide, AutoDelta)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Run the guide (a Pyro program); it gets no arguments, as sites do not depend on data."""
        posterior = self.posterior()
        if posterior is None:
            with module_local_params(), _Renamed(self._own):
                return self._named(self.guide())
        # The same variables as in Pyro's guide, but with a KL in closed form.
        return Guide.sample_from(posterior)

    def _named(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what the guide has for each site, by the sites' own names."""
        return {self._own.get(name, name): value for name, value in (values or {}).items()}

    def posterior(self) -> dict[str, td.Distribution] | None:
        """Return each site's posterior, with gradients, if they are one Normal or points."""
        joint = self.joint_normal()
        if joint is not None:
            return {name: joint.marginal(name) for name in joint.names}
        if type(self.guide) is not AutoDelta or not self._is_real:
            return None
        with module_local_params():
            guide: Any = self.guide
            names = [name for name, _ in guide.prototype_trace.iter_stochastic_nodes()]
            return self._named({name: Point(attrgetter(name)(guide)) for name in names})

    def joint_normal(self) -> Gaussian | None:
        """Return the posterior, with gradients, of a guide that is one Normal over all sites."""
        with module_local_params():
            covariance = covariance_of(self.guide) if self._is_real else None
            if covariance is None:
                return None
            loc: Any = self.guide.loc
            shapes = {name: part.shape for name, part in _parts(self.guide, loc).items()}
            return Gaussian(ParamBlocks.of_sites(shapes), loc, Inverse(covariance))

    def independent_normals(self) -> dict[str, td.Distribution] | None:
        """Return the Normal of each site of an `AutoDiagonalNormal`, or None for another guide."""
        if not (isinstance(self.guide, AutoDiagonalNormal) and self._is_real):
            return None
        with module_local_params():
            posterior = self.guide.get_posterior()
            locs, scales = (_parts(self.guide, v) for v in (posterior.mean, posterior.stddev))
        return {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}

    @property
    def _is_real(self) -> bool:
        return all(site.is_real for site in self.sites)

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        with module_local_params(), suppress(NotImplementedError):
            if isinstance(self.guide, AutoGuide):
                found = {name: value.clone() for name, value in self.guide.median().items()}
                return self._named(found)
        raise TypeError(
            f"{type(self.guide).__name__} has no median, nor another centre: predict with "
            "num_predictions of 1 or more, and use to_module(sample=True)"
        )

    @torch.no_grad()
    def as_priors(self) -> Mapping[str, td.Distribution]:
        posterior = self.posterior() or self.independent_normals()
        if posterior is not None:
            return posterior
        if isinstance(self.guide, _COUPLED) or not isinstance(self.guide, AutoGuide):
            raise TypeError(
                f"{type(self.guide).__name__} has no distribution per site; use "
                "tyxe.guides.AutoNormal where a posterior is to become a prior"
            )
        nodes = poutine.trace(self).get_trace().nodes
        found = {}
        for site in self.sites:
            # The sites of Pyro's AutoNormal are deltas at draws of `..._unconstrained`.
            base = nodes.get(site.name + _AUXILIARY)
            if base is None:
                found[site.name] = nodes[site.name]["fn"]
            elif site.is_real:
                found[site.name] = base["fn"]
            else:
                found[site.name] = on_support(base["fn"], site.support)
        return found


def _with_own_memory(guide: T) -> T:
    """Give each parameter memory of its own, which a start such as a prior's mean has not."""
    for parameter in guide.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return guide


# --------------------------------------------------------------------------- their joint Normals


@functools.singledispatch
def covariance_of(guide: Any) -> Operator | None:
    """Return the covariance over all sites of a guide that is a joint Normal, else None.

    Register your own guide if its posterior has that covariance and the mean `guide.loc`. The guide
    has been called once.
    """
    return None


@covariance_of.register
def _(guide: AutoMultivariateNormal) -> Operator:
    return Cholesky(guide.get_posterior().scale_tril)


@covariance_of.register
def _(guide: AutoLowRankMultivariateNormal) -> Operator:
    # Not of `get_posterior()`, which factorises it, and waits to see whether that has gone well.
    return LowRank(guide.scale * guide.scale, guide.cov_factor * guide.scale.unsqueeze(-1))


def _parts(guide: Any, vector: Tensor) -> dict[str, Tensor]:
    """Return the parts of a vector over a guide's joint variable, by site, in their order."""
    return {site["name"]: part for site, part in guide._unpack_latent(vector)}
