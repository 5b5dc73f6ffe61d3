"""Which parameters of a net a prior exposes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn

from tyxe import check

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
