"""The base class of priors: a selection of parameters and a distribution for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.priors.selection import Selection
from tyxe.priors.sites import SitePrior, SitePriors, part_of
from tyxe.util import SITE_PRIORS, same_support, without_events


class Prior(ABC):
    """A prior over the parameters of any net.

    A subclass implements `prior_dist`. Rules choose the parameters that become sites; the rest stay
    ordinary parameters, trained by maximum likelihood. With no rule every trainable parameter is a
    site. With `expose` rules only the parameters that they name are sites; `hide` rules then remove
    some. Frozen parameters (`requires_grad=False`) are sites only if an `expose` rule names them. A
    tied parameter has the names of all its places.

    Args:
        expose_all: `False` without any rule hides everything; next to rules it changes nothing.
        hide_all: hide every parameter, for maximum likelihood.
        rules: any of `hide`, `expose` (full names or globs such as `"layer4.*"`),
            `{hide,expose}_modules` (modules, their names, or globs; with everything inside),
            `{hide,expose}_module_types` (classes), `{hide,expose}_parameters` (last parts of names,
            such as `"bias"`), `{hide,expose}_fn` (`fn(module, name) -> bool`, with the full name).

    Raises:
        TypeError: a rule of a wrong type.
        ValueError: an unknown rule, or rules that contradict each other.
    """

    def __init__(self, expose_all: bool = True, hide_all: bool = False, **rules: Any) -> None:
        self.selection = Selection(expose_all, hide_all, **rules)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments()})"

    def _arguments(self) -> str:
        """Return the arguments in `repr`, but for the rules."""
        return ""

    @abstractmethod
    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> SitePrior:
        """Return the prior of one parameter.

        Args:
            name: the parameter's full name in the net, such as `0.weight`.
            module: the module that owns it.
            param: the parameter.

        Returns:
            A distribution over tensors of the parameter's shape (batch dimensions are taken as
            independent), or a function of Pyro statements that returns one.
        """

    @check.arguments
    def sites(self, net: nn.Module) -> dict[str, SitePrior]:
        """Return the sites of a net and their priors; the net is not changed.

        Raises:
            ValueError: a rule or an entry names something that the net does not have; a
                distribution has another shape than its parameter, or is a point.
            TypeError: `prior_dist` did not return a distribution.
        """
        elements, priors = self.elements(net), {}
        for parameter in self.selection.of(net):
            part = part_of(parameter.tensor, elements.get(parameter.name))
            if part.numel():
                priors[parameter.name] = self._checked(parameter.name, *parameter.places[0], part)
        self._check_entries(net, priors)
        return priors

    def elements(self, net: nn.Module) -> dict[str, Tensor]:
        """Return which elements are random, for each parameter of which only some are.

        They are indices into the flattened parameter, and the site is the vector of these elements.
        All other elements are fixed, as is a parameter without any.
        """
        return {}

    def _check_entries(self, net: nn.Module, sites: Iterable[str]) -> None:
        """Raise if the prior has entries that name no parameter of the net."""
        return

    def _checked(self, name: str, module: nn.Module, attribute: str, part: Tensor) -> SitePrior:
        param = part if isinstance(part, nn.Parameter) else nn.Parameter(part, requires_grad=False)
        prior = self.prior_dist(name, module, param)
        if not isinstance(prior, td.Distribution):
            if callable(prior):
                return _AsEvent(prior, name, param.shape)
            check.one_of(f"the prior of {name!r}", prior, td.Distribution, "a distribution")
        if isinstance(without_events(prior), dist.Delta):
            raise ValueError(
                f"the prior of {name!r} is a point, which no weight could leave. Where a posterior "
                "is to become the prior, use a guide with a spread, such as "
                "tyxe.guides.AutoNormal, or tyxe.LaplaceBNN; or hide the parameter"
            )
        return as_event(prior, name, param.shape)

    @check.arguments
    def apply_(self, net: nn.Module, prefix: str = "net.") -> None:
        """Record on a net which of its parameters are sites, and with which prior.

        The net's class and forward stay as they are: a `VariationalBNN` (or any other wrapper)
        puts draws in the sites' places.
        """
        net.__dict__[SITE_PRIORS] = SitePriors(self.sites(net), net, prefix, self.elements(net))

    def update_(self, net: nn.Module) -> None:
        """Replace the priors of a net's sites; the choice of sites does not change.

        Raises:
            ValueError: the net has no sites yet, or this prior does not fit one of them; the
                old priors then stay.
        """
        recorded: SitePriors | None = net.__dict__.get(SITE_PRIORS)
        if recorded is None:
            raise ValueError("the net has no sites; call prior.apply_(net) first")
        recorded.restore(self.replacing(recorded, net).snapshot())

    def replacing(self, recorded: SitePriors, net: nn.Module) -> SitePriors:
        """Return the priors that `update_` gives to the recorded sites of a net.

        Raises:
            ValueError: this prior does not fit one of the sites.
        """
        parameters, modules = dict(net.named_parameters()), dict(net.named_modules())
        priors = {}
        for name in recorded.names():
            owner, _, attribute = name.rpartition(".")
            part = recorded.part_of(name, parameters[name])
            priors[name] = self._checked(name, modules[owner], attribute, part)
        for name, old in recorded.priors():
            _check_replaces(name, old, priors[name])
        self._check_entries(net, priors)
        return SitePriors(priors, net, recorded.prefix, dict(recorded.elements.items()))


class _AsEvent:
    """A hierarchical prior whose distribution gets the parameter's shape as its event shape."""

    def __init__(
        self, function: Callable[[], td.Distribution], name: str, shape: torch.Size
    ) -> None:
        self.function, self.name, self.shape = function, name, shape

    def __call__(self) -> td.Distribution:
        return as_event(self.function(), self.name, self.shape)


def _check_replaces(name: str, old: SitePrior, new: SitePrior) -> None:
    """Raise unless a prior has the variables and the support for which the guide was built."""
    supports = [
        prior.support if isinstance(prior, td.Distribution) else None for prior in (old, new)
    ]
    if not (supports == [None, None] or (None not in supports and same_support(*supports))):
        raise ValueError(
            f"the new prior of {name!r} has other variables or another support than the old one; "
            "build a new BNN with it"
        )


def as_event(prior: td.Distribution, name: str, shape: torch.Size) -> td.Distribution:
    """Make every dimension of a prior an event dimension; raise if its shape does not fit."""
    found = prior.batch_shape + prior.event_shape
    if found != shape:
        raise ValueError(
            f"the prior of {name!r} has shape {tuple(found)}, but the parameter has shape "
            f"{tuple(shape)}; expand the distribution to that shape"
        )
    if not prior.batch_shape and isinstance(prior, dist.Distribution):
        return prior
    return dist.Independent(prior, len(prior.batch_shape), validate_args=False)
