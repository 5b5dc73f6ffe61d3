"""The joint prior of a net's sites: a module, and a Pyro program that samples them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import torch.distributions as td
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message
from torch import Tensor, nn

from tyxe.distributions import Gaussian, JointDistribution, JointMarginal
from tyxe.distributions.buffered import BufferedDistribution
from tyxe.distributions.joint import JointSite
from tyxe.files import of_bytes
from tyxe.util import SiteTensors, fan_in_fan_out, layer_weight, part_of

SitePrior = td.Distribution | Callable[[], td.Distribution]


class _Prefixed(Messenger):
    """Give the statements of a hierarchical prior the net's prefix in the joint model."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def _pyro_sample(self, msg: Message) -> None:
        if not msg["name"].startswith(self.prefix):
            msg["name"] = self.prefix + msg["name"]


class _Hierarchical(nn.Module):
    """A prior that is a function of Pyro statements; if it is a module, a submodule."""

    def __init__(self, function: Callable[[], td.Distribution]) -> None:
        super().__init__()
        inner = getattr(function, "function", function)
        self.tensors = inner if isinstance(inner, nn.Module) else None
        self.function = function


class SitePriors(nn.Module):
    """The sites of a net with their priors: a module and a Pyro program.

    Calling it samples each site under `prefix` + its name in the net, and returns the values by
    those names. Guides are built from it. `elements` are those of `Prior.elements`.
    """

    def __init__(
        self,
        priors: Mapping[str, SitePrior],
        net: nn.Module,
        prefix: str = "net.",
        elements: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        parameters, modules = dict(net.named_parameters()), dict(net.named_modules())
        self._own_values = {name: parameters[name] for name in priors}
        self._fans: dict[str, tuple[float, float]] = {}
        for name in priors:
            owner, _, attribute = name.rpartition(".")
            weight = layer_weight(modules[owner], attribute)
            self._fans[name] = fan_in_fan_out(weight, modules[owner])
        places = {n: i.to(parameters[n].device) for n, i in (elements or {}).items() if n in priors}
        self.elements = SiteTensors(places, trainable=None)
        self.update(priors, parameters)

    def update(self, priors: Mapping[str, SitePrior], like: Mapping[str, Tensor]) -> None:
        """Replace the priors of all sites, in the dtypes and on the devices of the tensors `like`.

        Marginals of a joint distribution are stored as that one, and all have to be there.
        """
        joints = _joints_of(priors, self.prefix)
        entries: list[nn.Module] = []
        numbers: dict[int, int] = {}
        units = []
        for name, prior in priors.items():
            whole = joints.get(name, prior)
            if name not in joints or id(whole) not in numbers:
                numbers[id(whole)] = len(entries)
                if isinstance(whole, td.Distribution):
                    entries.append(BufferedDistribution(whole, like[name]))
                else:
                    entries.append(_Hierarchical(whole))
            units.append((name, numbers[id(whole)]))
        self._units, self._entries = units, nn.ModuleList(entries)

    def part_of(self, name: str, tensor: Tensor) -> Tensor:
        """Return a site's elements of a tensor of the parameter's shape."""
        return part_of(tensor, self.elements[name]) if name in self.elements else tensor

    def whole_of(self, name: str, fixed: Tensor, value: Tensor) -> Tensor:
        """Return a site's value with the fixed elements around it, which it may have already."""
        # All elements of a vector have its shape, and perhaps another order.
        if name not in self.elements or value.shape == fixed.shape != self.elements[name].shape:
            return value
        flat = fixed.detach().flatten()
        return flat.scatter(0, self.elements[name], value.to(flat)).view_as(fixed)

    def snapshot(self) -> Any:
        """Return what `restore` takes to undo a change, or to take the priors of another object."""
        return self._units, self._entries

    def restore(self, snapshot: Any) -> None:
        """Take the priors of a `snapshot`, which is of the same sites."""
        self._units, self._entries = snapshot

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Build the joint Gaussians that the state describes before their numbers are loaded."""
        self._check_elements(state_dict, prefix)
        start = f"{prefix}_entries."
        found: dict[str, JointDistribution] = {}
        for key, extra in state_dict.items():
            if not (key.startswith(start) and key.endswith("._extra_state")):
                continue
            extra = of_bytes(extra)
            if isinstance(extra, dict) and "outline" in extra:
                joint = Gaussian.from_outline(extra["outline"])
                found |= {name.removeprefix(self.prefix): joint for name in joint.names}
        if found and set(found) <= set(self.names()):
            own = dict(self.priors())
            marginals = {name: joint.marginal(self.prefix + name) for name, joint in found.items()}
            self.update({**own, **marginals}, self._own_values)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check_elements(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise where a state has other numbers of chosen weights, which no guide here takes."""
        start = f"{prefix}elements."
        given = {
            n.removeprefix(start): i.shape for n, i in state_dict.items() if n.startswith(start)
        }
        own = {name: indices.shape for name, indices in self.elements.items()}
        if given != own and any(name.startswith(prefix) for name in state_dict):
            raise ValueError(
                "the state has other chosen weights: build the BNN with the same SubnetworkPrior, "
                "or on the same trained net"
            )

    def __len__(self) -> int:
        return len(self._units)

    def names(self) -> list[str]:
        """The sites' names in the net."""
        return [name for name, _ in self._units]

    def priors(self) -> Iterator[tuple[str, SitePrior]]:
        """Yield each site's name in the net and its prior; for a joint prior, the marginal."""
        for name, number in self._units:
            prior = self._prior(number)
            if isinstance(prior, JointDistribution):
                yield name, prior.marginal(self.prefix + name)
            else:
                yield name, prior

    def joints(self) -> list[JointDistribution]:
        """Return the priors that hold several sites at once."""
        found = [self._prior(number) for number in range(len(self._entries))]
        return [prior for prior in found if isinstance(prior, JointDistribution)]

    def _prior(self, number: int) -> SitePrior:
        entry = self._entries[number]
        if isinstance(entry, BufferedDistribution):
            return entry.distribution
        assert isinstance(entry, _Hierarchical)
        return entry.function

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; arguments (a batch, as guides pass it) are ignored."""
        values: dict[str, Tensor] = {}
        draws: dict[int, Callable[[], Tensor]] = {}
        chosen = dict(self.elements.items())
        for name, number in self._units:
            joint_name, prior, own = self.prefix + name, self._prior(number), self._own_values[name]
            is_fixed = isinstance(prior, td.Distribution)
            if isinstance(prior, JointDistribution):
                # One draw, which is made at the first of its sites that is sampled.
                draw = draws.setdefault(number, functools.cache(prior.rsample))
                earlier = {site: values[site] for site in prior.names if site in values}
                prior = JointSite(prior, joint_name, draw, earlier)
            elif not isinstance(prior, td.Distribution):
                with _Prefixed(self.prefix):
                    prior = prior()
            infer = {
                "fans": self._fans[name],
                # Empty while a fit has divided the parameters, in which no guide starts from it.
                "own_value": self.part_of(name, own) if own.numel() else own,
                "elements": chosen.get(name),
                "is_drawn_anew": not is_fixed,
            }
            values[joint_name] = pyro.sample(joint_name, prior, infer=infer)
        return values


def _joints_of(priors: Mapping[str, SitePrior], prefix: str) -> dict[str, JointDistribution]:
    """Return the joint distribution of every site that has one; raise if it lacks some sites."""
    given: dict[int, dict[str, str]] = {}
    found: dict[str, JointDistribution] = {}
    for name, prior in priors.items():
        if isinstance(prior, JointMarginal):
            found[name] = prior.joint
            given.setdefault(id(prior.joint), {})[prior.site] = name
            if prior.site != prefix + name:
                raise ValueError(
                    f"the prior of {prefix + name!r} is that of {prior.site!r} in a joint "
                    "distribution: give the marginals by their own names, to a BNN of that name"
                )
    for joint in found.values():
        missing = [site for site in joint.names if site not in given[id(joint)]]
        if missing:
            raise ValueError(
                f"a joint distribution is a prior for all of its sites or none: "
                f"{', '.join(given[id(joint)])} have it, and {', '.join(missing)} not. Ask for all "
                "of them: get_detached_distributions(tyxe.util.pyro_sample_sites(bnn.net))"
            )
    return found
