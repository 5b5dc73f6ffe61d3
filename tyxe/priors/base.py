"""The base class of priors: a selection of parameters and a distribution for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.priors.sites import SitePrior, SitePriors
from tyxe.util import SITE_PRIORS, part_of, same_support, without_events

Place = tuple[nn.Module, str]
T = TypeVar("T")

# Rules that hide and that expose, by what they name.
PAIRS = [
    (f"hide{what}", f"expose{what}")
    for what in ("", "_modules", "_module_types", "_parameters", "_fn")
]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a net, with every place that holds it (several where it is tied).

    `places` are `(module, attribute)` pairs, `names` the full names there, and `name` the first.
    """

    name: str
    tensor: nn.Parameter
    places: tuple[Place, ...]
    names: tuple[str, ...]


def parameters_of(net: nn.Module) -> list[Parameter]:
    """List a net's parameters once each, in order, with all the places of a tied one."""
    found: dict[int, tuple[nn.Parameter, list[Place], list[str]]] = {}
    for prefix, module in net.named_modules():
        for attribute, tensor in module._parameters.items():
            if tensor is not None:
                entry = found.setdefault(id(tensor), (tensor, [], []))
                entry[1].append((module, attribute))
                entry[2].append(f"{prefix}.{attribute}" if prefix else attribute)
    return [
        Parameter(names[0], tensor, tuple(places), tuple(names))
        for tensor, places, names in found.values()
    ]


class Selection:
    """The hide and expose rules of a `Prior`, which documents them."""

    def __init__(self, expose_all: bool = True, hide_all: bool = False, **rules: Any) -> None:
        kinds = [pair[which] for which in (0, 1) for pair in PAIRS]
        for name in rules:
            check.choice("a rule", name, kinds)
        self.rules = {
            # One module: a container would be iterated over, and lose parameters of its own.
            kind: [rule] if isinstance(rule, nn.Module) and kind.endswith("_modules") else rule
            for kind, rule in rules.items()
            if rule is not None
        }
        for kind, rule in self.rules.items():
            _check_type(kind, rule)
        narrowing = [kind for kind in self.rules if kind.startswith("expose")]
        if hide_all and narrowing:
            raise ValueError(
                f"hide_all=True contradicts {narrowing[0]}; {narrowing[0]} alone already hides "
                "everything else"
            )
        self.hide_all = hide_all or not (expose_all or self.rules)

    def of(self, net: nn.Module) -> list[Parameter]:
        """Return the exposed parameters of a net, in order; raise if rules do not fit."""
        parameters = parameters_of(net)
        named = {kind: _named(kind, rule, net, parameters) for kind, rule in self.rules.items()}
        for hide, expose in PAIRS:
            if both := named.get(hide, set()) & named.get(expose, set()):
                raise ValueError(f"{hide} and {expose} both name {min(both)!r}")
        hidden = {kind: names for kind, names in named.items() if kind.startswith("hide")}
        exposed = {kind: names for kind, names in named.items() if kind.startswith("expose")}
        idle = ", ".join(exposed) + " expose" if exposed and not any(exposed.values()) else ""
        if self.rules.get("hide_modules") and not hidden["hide_modules"]:
            idle = "hide_modules hide"
        if idle:
            raise ValueError(
                f"{idle} no parameter of the net; it has {', '.join(p.name for p in parameters)}"
            )
        shown = set().union(*exposed.values()) if exposed else _trained(parameters)
        shown -= set().union(*hidden.values())
        return [p for p in parameters if p.name in shown and not self.hide_all and _is_real(p)]


def _trained(parameters: Iterable[Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters if parameter.tensor.requires_grad}


def _is_real(parameter: Parameter) -> bool:
    """Whether a parameter may have a distribution, for which it needs elements."""
    return parameter.tensor.is_floating_point() and parameter.tensor.numel() > 0


def _check_type(kind: str, rule: Any) -> None:
    if kind.endswith("_fn"):
        check.one_of(kind, rule, Callable, "a function of (module, name)")
        return
    for each in check.listed(kind, rule):
        if kind.endswith("module_types"):
            check.one_of(f"one of {kind}", each, type, "a class, such as nn.BatchNorm2d")


def _named(kind: str, rule: Any, net: nn.Module, parameters: Sequence[Parameter]) -> set[str]:
    """Return which parameters a rule names; raise for an item that names nothing of the net."""
    what = kind.partition("_")[2]
    places = [
        (parameter.name, module, attribute, name)
        for parameter in parameters
        for (module, attribute), name in zip(parameter.places, parameter.names, strict=True)
    ]
    if what == "fn":
        return {own for own, module, _, name in places if rule(module, name)}
    if what in ("", "parameters"):
        known = [(attribute if what else name, own) for own, _, attribute, name in places]
        return {own for item in rule for own in named_by(kind, item, known)}
    if what == "modules":
        modules = list(net.named_modules())
        outer = [module for item in rule for module in named_by(kind, item, modules)]
    else:  # which may be written for other nets as well
        outer = [module for module in net.modules() if isinstance(module, tuple(rule))]
    inside = {id(inner) for module in outer for inner in module.modules()}
    return {own for own, module, *_ in places if id(module) in inside}


def named_by(kind: str, item: Any, known: Iterable[tuple[str, T]]) -> list[T]:
    """Return what one item of a rule names: a glob, or a thing itself; raise if there is none."""
    if isinstance(item, str):
        found = [thing for name, thing in known if fnmatchcase(name, item)]
    else:
        found = [thing for _, thing in known if thing is item]
    if not found:
        given = repr(item) if isinstance(item, str) else f"a {type(item).__name__} module"
        names = ", ".join(dict.fromkeys(name for name, _ in known if name))
        raise ValueError(
            f"{kind} names {given}, which the net does not have; it has "
            f"{names or 'no parts, and is one itself'}"
        )
    return found


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
