"""The joint prior of a net's sites: a module, and a Pyro program that samples them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import torch.distributions as td
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from tyxe.distributions import StoredDistribution
from tyxe.util import fan_in_fan_out, layer_weight

__all__ = ["SitePrior", "SitePriors"]

SitePrior = td.Distribution | Callable[[], td.Distribution]


class _Prefixed(Messenger):
    """Give the statements of a hierarchical prior their place in the joint model."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["name"].startswith(self.prefix):
            msg["name"] = self.prefix + msg["name"]


class _Hierarchical(nn.Module):
    """A prior that is a function of Pyro statements; a module among them moves along."""

    def __init__(self, function: Callable[[], td.Distribution]) -> None:
        super().__init__()
        inner = getattr(function, "function", function)
        self.tensors = inner if isinstance(inner, nn.Module) else None
        self.function = function


class SitePriors(nn.Module):
    """The sites of a net with their priors.

    Calling it is a Pyro program: each site is sampled under `prefix` + its name in the net, and
    the values are returned by those names. Guides are built from it.

    Args:
        priors: a distribution for each site, or a function of Pyro statements that returns one.
        net: the net that owns the sites.
        prefix: what the joint model puts before a site's name.

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> net, prior = nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1))
        >>> priors = SitePriors(prior.sites(net), net)
        >>> list(priors())
        ['net.weight', 'net.bias']
    """

    def __init__(
        self, priors: Mapping[str, SitePrior], net: nn.Module, prefix: str = "net."
    ) -> None:
        super().__init__()
        self.prefix = prefix
        parameters = dict(net.named_parameters())
        self._own_values = {name: parameters[name] for name in priors}
        self._fans: dict[str, tuple[float, float]] = {}
        for name in priors:
            owner, _, attribute = name.rpartition(".")
            module = net.get_submodule(owner)
            self._fans[name] = fan_in_fan_out(layer_weight(module, attribute), module)
        self.update(priors, parameters)

    def update(self, priors: Mapping[str, SitePrior], like: Mapping[str, Tensor]) -> None:
        """Replace the priors of all sites.

        Args:
            priors: one entry for each site.
            like: tensors by site, whose dtype and device the priors take.
        """
        entries = nn.ModuleList(_store(prior, like[name]) for name, prior in priors.items())
        self._names, self._entries = list(priors), entries

    def __len__(self) -> int:
        return len(self._names)

    def names(self) -> list[str]:
        """The sites' names in the net."""
        return list(self._names)

    def priors(self) -> Iterator[tuple[str, SitePrior]]:
        """Yield each site's name in the net and its prior."""
        for name, entry in zip(self._names, self._entries, strict=True):
            if isinstance(entry, StoredDistribution):
                yield name, entry.distribution
            else:
                assert isinstance(entry, _Hierarchical)
                yield name, entry.function

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site; arguments (a batch, as guides pass it) are ignored."""
        values = {}
        for name, prior in self.priors():
            distribution = self._distribution(prior)
            infer = {"fans": self._fans[name], "own_value": self._own_values[name]}
            values[self.prefix + name] = pyro.sample(self.prefix + name, distribution, infer=infer)
        return values

    def _distribution(self, prior: SitePrior) -> td.Distribution:
        if isinstance(prior, td.Distribution):
            return prior
        with _Prefixed(self.prefix):
            return prior()


def _store(prior: SitePrior, like: Tensor) -> nn.Module:
    if isinstance(prior, td.Distribution):
        return StoredDistribution(prior, like)
    return _Hierarchical(prior)
