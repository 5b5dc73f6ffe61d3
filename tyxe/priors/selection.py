"""Which parameters of a net a prior exposes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tyxe.check import described

Place = tuple[nn.Module, str]

RULES = ("", "modules", "module_types", "parameters", "fn")


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
        kinds = [f"{verb}_{rule}".rstrip("_") for verb in ("hide", "expose") for rule in RULES]
        unknown = sorted(set(rules) - set(kinds))
        if unknown:
            raise TypeError(f"unknown rule {unknown[0]!r}; the rules are {', '.join(kinds)}")
        self.rules = {
            # One module: a container would be iterated over, and lose parameters of its own.
            kind: [rule] if isinstance(rule, nn.Module) and kind.endswith("_modules") else rule
            for kind, rule in rules.items()
            if rule is not None
        }
        for kind, rule in self.rules.items():
            self._check_type(kind, rule)
        narrowing = [kind for kind in self.rules if kind.startswith("expose")]
        if hide_all and narrowing:
            raise ValueError(
                f"hide_all=True contradicts {narrowing[0]}; {narrowing[0]} alone already hides "
                "everything else"
            )
        self.hide_all = hide_all or not (expose_all or self.rules)
        self.narrows = bool(narrowing)

    @staticmethod
    def _check_type(kind: str, rule: Any) -> None:
        if kind.endswith("_fn"):
            if not callable(rule):
                raise TypeError(f"{kind} is {rule!r}; expected a function of (module, name)")
        elif isinstance(rule, str) or not isinstance(rule, Iterable):
            raise TypeError(f"{kind} is {described(rule)}; expected a list: {kind}=[...]")
        elif kind.endswith("module_types") and not all(isinstance(t, type) for t in rule):
            raise TypeError(f"{kind} is {rule!r}; expected classes, such as nn.BatchNorm2d")

    def of(self, net: nn.Module) -> list[Parameter]:
        """Return the exposed parameters of a net, in order.

        Raises:
            ValueError: a rule names a parameter or module that the net does not have, or one
                parameter is both hidden and exposed by rules of the same kind.
        """
        parameters = parameters_of(net)
        matched = {
            kind: [p.name for p in parameters if self._matches(kind, rule, p, net)]
            for kind, rule in self.rules.items()
        }
        self._check_all_used(net, parameters)
        for rule in RULES:
            hide, expose = (f"{verb}_{rule}".rstrip("_") for verb in ("hide", "expose"))
            both = set(matched.get(hide, [])) & set(matched.get(expose, []))
            if both:
                raise ValueError(f"{hide} and {expose} both name {sorted(both)[0]!r}")
        self._check_matches(matched, parameters)
        return [p for p in parameters if self._exposes(p, matched)]

    def _check_matches(self, matched: dict[str, list[str]], parameters: list[Parameter]) -> None:
        rules = {kind: names for kind, names in matched.items() if kind.startswith("expose")}
        idle = ", ".join(rules) + " expose" if rules and not any(rules.values()) else ""
        if self.rules.get("hide_modules") and not matched["hide_modules"]:
            idle = "hide_modules hide"
        if idle:
            raise ValueError(
                f"{idle} no parameter of the net; it has {', '.join(p.name for p in parameters)}"
            )

    def _exposes(self, parameter: Parameter, matched: dict[str, list[str]]) -> bool:
        named = {kind.split("_")[0] for kind, names in matched.items() if parameter.name in names}
        # A parameter without elements has no distribution.
        real = parameter.tensor.is_floating_point() and parameter.tensor.numel() > 0
        if self.hide_all or "hide" in named or not real:
            return False
        return "expose" in named if self.narrows else parameter.tensor.requires_grad

    def _matches(self, kind: str, rule: Any, parameter: Parameter, net: nn.Module) -> bool:
        what = kind.partition("_")[2]
        if what == "":
            return any(fnmatchcase(name, glob) for name in parameter.names for glob in rule)
        if what == "parameters":
            return any(fnmatchcase(attr, glob) for _, attr in parameter.places for glob in rule)
        if what == "module_types":
            return any(_within(module, tuple(rule), net) for module, _ in parameter.places)
        if what == "fn":
            named = zip(parameter.places, parameter.names, strict=True)
            return any(rule(module, name) for (module, _), name in named)
        return any(_inside(module, rule, net) for module, _ in parameter.places)

    def _check_all_used(self, net: nn.Module, parameters: list[Parameter]) -> None:
        names = [name for p in parameters for name in p.names]
        modules = dict(net.named_modules())
        known = {
            "": names,
            "parameters": sorted({attribute for p in parameters for _, attribute in p.places}),
            "modules": [name for name in modules if name],
        }
        for kind, rule in self.rules.items():
            what = kind.partition("_")[2]
            # Classes and functions may be written for other nets as well.
            for item in rule if what in known else []:
                if what == "modules":
                    is_there = bool(_modules_named(item, modules))
                else:
                    is_there = any(fnmatchcase(name, item) for name in known[what])
                if not is_there:
                    raise ValueError(
                        f"{kind} names {_brief(item)}, which the net does not have; it has "
                        f"{', '.join(known[what]) or 'no parts, and is one itself'}"
                    )


def _brief(thing: Any) -> str:
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__name__} module"


def _modules_named(module: nn.Module | str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    if isinstance(module, str):
        return [found for name, found in modules.items() if fnmatchcase(name, module)]
    return [found for found in modules.values() if found is module]


def _within(module: nn.Module, types: tuple[type, ...], net: nn.Module) -> bool:
    outer = [found for found in net.modules() if isinstance(found, types)]
    return any(module is inner for found in outer for inner in found.modules())


def _inside(module: nn.Module, rule: Iterable[nn.Module | str], net: nn.Module) -> bool:
    modules = dict(net.named_modules())
    named = [found for item in rule for found in _modules_named(item, modules)]
    return any(module is inner for outer in named for inner in outer.modules())
