"""What a guide is: distributions over sites, from which a Pyro program follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import constraints

from tyxe.distributions import JointDistribution, JointMarginal, detached, is_real
from tyxe.util import resolve_site_name

__all__ = ["Guide", "Site", "detached_together", "site_named", "sites_of"]


@dataclass(frozen=True)
class Site:
    """One latent variable of the program that a guide is built from.

    Attributes:
        name: its name in the joint model, such as `net.0.weight`.
        own_name: its name in the net, such as `0.weight`.
        shape: of its values.
        support: the constraint its values satisfy.
    """

    name: str
    own_name: str
    shape: torch.Size
    support: constraints.Constraint

    @property
    def is_real(self) -> bool:
        """Whether values are unconstrained."""
        return is_real(self.support)


def sites_of(
    module: Callable[..., Any], takes_discrete: bool = False
) -> tuple[list[Site], dict[str, dict[str, Any]]]:
    """Run a program once and list its latent variables, with their Pyro messages by name.

    Raises:
        ValueError: it has none, or a discrete one that is not taken.
    """
    prefix = getattr(module, "prefix", "")
    with torch.no_grad():
        trace = poutine.trace(poutine.block(module, hide_types=["observe"])).get_trace()
    messages = {name: trace.nodes[name] for name in trace.stochastic_nodes}
    if not messages:
        raise ValueError(
            "a guide needs latent variables, but the prior exposes none: expose some, or pass no "
            "guide (maximum likelihood is hide_all=True without one)"
        )
    sites = []
    for name, message in messages.items():
        if message["fn"].support.is_discrete and not takes_discrete:
            raise ValueError(
                f"site {name!r} is discrete; this guide needs continuous sites (for weights of two "
                "values there is tyxe.guides.AutoBernoulli)"
            )
        sites.append(
            Site(name, name.removeprefix(prefix), message["value"].shape, message["fn"].support)
        )
    return sites, messages


def site_named(sites: Iterable[Site], name: str) -> Site:
    """Return the site of a name, in either spelling.

    Raises:
        ValueError: there is none.
    """
    known = {site.own_name: site for site in sites}
    joint = {site.name: site for site in known.values()}
    return joint[name] if name in joint else known[resolve_site_name(name, known)]


class Guide(nn.Module, ABC):
    """Base of guides that hold distributions over sites.

    A subclass sets its parameters up in the constructor and implements `site_distribution`, and
    `joints` where its posterior couples sites; the rest, down to the Pyro program, follows.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.

    Raises:
        ValueError: the program has no latent variable, or a discrete one and `takes_discrete` is
            False.
    """

    takes_discrete: ClassVar[bool] = False

    def __init__(self, module: Callable[..., Any]) -> None:
        super().__init__()
        self.sites, self.messages = sites_of(module, self.takes_discrete)

    @abstractmethod
    def site_distribution(self, site: Site) -> td.Distribution:
        """Return the posterior of a site that no joint one holds, over values of its shape."""

    def joints(self) -> Iterable[JointDistribution]:
        """Return the posteriors that hold several sites at once; none unless implemented."""
        return ()

    def posterior(self) -> dict[str, td.Distribution]:
        """Return the posterior of every site by its name in the joint model, with gradients.

        That of a site in a joint posterior is its marginal, which knows the joint one.
        """
        joint = {name: q for q in self.joints() for name in q.names}
        return {
            site.name: joint[site.name].marginal(site.name)
            if site.name in joint
            else self.site_distribution(site)
            for site in self.sites
        }

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site (a Pyro program); arguments are ignored."""
        return self.sample_from(self.posterior())

    @staticmethod
    def sample_from(posterior: Mapping[str, td.Distribution]) -> dict[str, Tensor]:
        """Sample every site from a posterior formed before: for several draws from one."""
        parts: dict[str, Tensor] = {}
        values = {}
        for name, q in posterior.items():
            if isinstance(q, JointMarginal):
                if name not in parts:
                    parts.update(_sample_joint(q.joint))
                q = dist.Delta(parts[name], event_dim=parts[name].dim())
            values[name] = pyro.sample(name, q)
        return values

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the median of every site, by its name in the joint model."""
        posterior = self.posterior()
        medians = {
            # Of two values the likelier one is the median.
            site.name: posterior[site.name].mode
            if site.support.is_discrete
            else _median(posterior[site.name])
            for site in self.sites
        }
        return {name: median.detach().clone() for name, median in medians.items()}

    def _own(self, name: str) -> Site:
        return site_named(self.sites, name)

    def get_detached_distributions(
        self, site_names: Iterable[str] | None = None
    ) -> dict[str, td.Distribution]:
        """Return posteriors that share no storage or gradient with the guide: priors to be.

        Args:
            site_names: which sites, in either spelling; all by default.

        Returns:
            Distributions by the names asked for (the net's own by default), for `DictPrior`. Those
            of coupled sites are marginals that know one copy of their joint posterior, which is
            what a `DictPrior` of all of them means.

        Raises:
            ValueError: a name that is no site.
        """
        names = [s.own_name for s in self.sites] if site_names is None else list(site_names)
        sites = {name: self._own(name) for name in names}
        with torch.no_grad():
            posterior = self.posterior()
        found = detached_together({site.name: posterior[site.name] for site in sites.values()})
        return {name: found[site.name] for name, site in sites.items()}

    def parameter_kinds(self) -> Mapping[str, str]:
        """Return the kind of each parameter by name: `loc`, `scale` or another word."""
        return {
            name: "scale" if "scale" in name.split(".")[0] else "loc"
            for name, _ in self.named_parameters()
        }

    @property
    def kind(self) -> str:
        """What has to be the same for a state dict to mean the same; saved with it."""
        return type(self).__name__

    def get_extra_state(self) -> str:
        """Return the guide's kind."""
        return self.kind

    def set_extra_state(self, state: str) -> None:
        """Compare the kinds.

        Raises:
            RuntimeError: the state is that of a guide which reads its parameters differently.
        """
        if state != self.kind:
            other = state if isinstance(state, str) else "that of another kind of BNN"
            raise RuntimeError(f"the guide is {self.kind} here and {other} in the state dict")

    def __getstate__(self) -> dict[str, Any]:
        # The messages hold the prior's objects and serve the constructor only.
        return {**self.__dict__, "messages": {}}


def detached_together(posterior: Mapping[str, td.Distribution]) -> dict[str, td.Distribution]:
    """Detach distributions by site, each joint one once for all its marginals.

    Args:
        posterior: by site.

    Returns:
        Copies, by the same names.
    """
    joints: dict[int, JointDistribution] = {}
    found: dict[str, td.Distribution] = {}
    for name, q in posterior.items():
        if not isinstance(q, JointMarginal):
            found[name] = detached(q)
            continue
        if id(q.joint) not in joints:
            copied = detached(q.joint)
            assert isinstance(copied, JointDistribution)
            joints[id(q.joint)] = copied
        found[name] = joints[id(q.joint)].marginal(q.site)
    return found


def _sample_joint(q: JointDistribution) -> dict[str, Tensor]:
    return q.separate(pyro.sample(q.name, q, infer={"is_auxiliary": True}))


def _median(q: td.Distribution) -> Tensor:
    if isinstance(q, td.TransformedDistribution):
        value = _median(q.base_dist)
        for transform in q.transforms:
            value = transform(value)
        return value
    return q.mean
