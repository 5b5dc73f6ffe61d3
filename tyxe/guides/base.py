"""The base class of guides: distributions over sites, and the Pyro program that samples them."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import constraints

from tyxe import check
from tyxe.distributions import (
    Gaussian,
    JointDistribution,
    JointMarginal,
    ParamBlocks,
    as_gaussian,
    center,
    independent_moments,
)
from tyxe.distributions.buffered import detached
from tyxe.files import as_bytes, of_bytes
from tyxe.linalg import Diagonal, Inverse, Operator
from tyxe.linalg.functions import permuted
from tyxe.threads import only_handlers
from tyxe.util import (
    at_least_float32,
    elementwise,
    is_discrete,
    is_real,
    resolve_site_name,
    without_events,
)


@dataclass(frozen=True)
class Site:
    """One latent variable of the program that a guide is built from.

    `name` is its name in the joint model, such as `net.0.weight`, and `own_name` its name in the
    net, such as `0.weight`.
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
    """Run a program once and return its latent variables, with their messages by name."""
    program = module.forward if isinstance(module, nn.Module) else module
    try:
        inspect.signature(program).bind()
    except TypeError as error:
        raise TypeError(
            f"a guide takes a program without arguments that samples weights, and got "
            f"{check.described(module)} ({error}): pass a BNN the guide's class, or "
            "functools.partial of it, and it makes the guide of its prior"
        ) from None
    prefix = getattr(module, "prefix", "")
    # A handler around the constructor is for what runs inside of it, which this is not.
    latent = poutine.block(module, hide_types=["observe"])
    with torch.no_grad(), only_handlers(()), poutine.trace() as messenger:
        latent()
    trace = messenger.trace
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
    """Return the site of a name, with or without the joint model's prefix; raise if none has it."""
    known = {site.own_name: site for site in sites}
    joint = {site.name: site for site in known.values()}
    return joint[name] if name in joint else known[resolve_site_name(name, known)]


def check_real(sites: Iterable[Site], what: str) -> None:
    """Raise a ValueError for a site whose support is not the real numbers."""
    for site in sites:
        if not site.is_real:
            raise ValueError(
                f"{what} is a Gaussian, but {site.name!r} has the support {site.support}; hide it, "
                "or use VariationalBNN"
            )


# Names of parts of guides that are guides themselves, and words for a parameter of their spread.
_INSIDE, _SPREAD = re.compile(r"^((guide|rest|u)\.)+"), re.compile("scale|cov_factor|cov_diag")


class AnyGuide(nn.Module, ABC):
    """The interface of every guide: ours, those of Pyro, and that of a Laplace approximation.

    Attributes:
        sites: what the guide is a distribution over.
    """

    sites: list[Site]

    @abstractmethod
    def posterior(self) -> dict[str, td.Distribution] | None:
        """Return the posterior of every site by its name in the joint model, with gradients.

        A site of a joint distribution has a `JointMarginal`. The result is None for a guide that is
        only a program, without distributions in closed form.
        """

    @abstractmethod
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the median of every site, by its name in the joint model."""

    @property
    def has_spread(self) -> bool:
        """Whether draws differ, unlike those of a point estimate."""
        return True

    def parameter_kinds(self) -> Mapping[str, str]:
        """Return the kind of each parameter by name: `scale`, `loc`, or one that the guide defines.

        It is read from the first part of the name, after those of inner guides, such as `scales` in
        `rest.scales.0.weight`.
        """
        names = [name for name, _ in self.named_parameters()]
        words = {name: _INSIDE.sub("", name).partition(".")[0] for name in names}
        return {n: "scale" if _SPREAD.search(word) else "loc" for n, word in words.items()}

    def as_priors(self) -> Mapping[str, td.Distribution]:
        """Return the distributions for a next prior, by site's name in the joint model."""
        return self.posterior() or {}

    @check.arguments
    def get_detached_distributions(
        self, site_names: Iterable[str] | None = None
    ) -> dict[str, td.Distribution]:
        """Return posteriors that share no storage or gradient with the guide, for use as priors.

        Args:
            site_names: sites by their name in the net or in the joint model; all by default.

        Returns:
            Distributions by the names given (the net's own by default), for `DictPrior`. Coupled
            sites have marginals of one copy of their joint posterior; a `DictPrior` needs all of
            them. Those of a Laplace approximation record the curvature that they contain.

        Raises:
            RuntimeError: there is no posterior yet.
            TypeError: the guide couples its sites without a closed form.
            ValueError: a name that is not a site.
        """
        names = [s.own_name for s in self.sites] if site_names is None else list(site_names)
        sites = {name: site_named(self.sites, name) for name in names}
        with torch.no_grad():
            posterior = self.as_priors()
        found = detached_together({site.name: posterior[site.name] for site in sites.values()})
        return {name: found[site.name] for name, site in sites.items()}


class Guide(AnyGuide):
    """Base of guides that hold distributions over sites.

    A subclass sets up its parameters in the constructor and implements `site_distribution`, and
    `joints` where its posterior couples sites. Everything else follows, including the Pyro program.

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
        """Return the posterior of a site outside `joints`, over values of the site's shape."""

    def joints(self) -> Iterable[JointDistribution]:
        """Return the posteriors that couple several sites; none by default."""
        return ()

    def posterior(self) -> dict[str, td.Distribution]:
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
        """Sample every site from what `posterior` returned, so that several draws can share it."""
        parts: dict[str, Tensor] = {}
        values = {}
        for name, q in posterior.items():
            if isinstance(q, JointMarginal):
                if name not in parts:
                    draw = pyro.sample(q.joint.name, q.joint, infer={"is_auxiliary": True})
                    parts.update(q.joint.unflatten(draw))
                q = dist.Delta(parts[name], event_dim=parts[name].dim())
            values[name] = pyro.sample(name, q)
        return values

    @staticmethod
    def draw_from(
        posterior: Mapping[str, td.Distribution], count: int | None = None
    ) -> dict[str, Tensor]:
        """Draw every site, or `count` times at once, `(count, ...)`, without a Pyro program."""
        size = torch.Size([] if count is None else [count])
        parts: dict[str, Tensor] = {}
        for name, q in posterior.items():
            if isinstance(q, JointMarginal):
                known = name in parts
                parts |= {} if known else q.joint.unflatten(q.joint.rsample(size))
            else:
                parts[name] = q.rsample(size) if q.has_rsample else q.sample(size)
        return {name: parts[name] for name in posterior}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: _median(q).detach().clone() for name, q in self.posterior().items()}

    def _own(self, name: str) -> Site:
        return site_named(self.sites, check.one_of("site_name", name, str, "a string"))

    @property
    def kind(self) -> str:
        """The class and options that are needed to read a state dict, and are saved in it."""
        return type(self).__name__

    def get_extra_state(self) -> Tensor:
        return as_bytes(self.kind)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that the state has this guide's `kind`.

        Raises:
            RuntimeError: the state is of a guide that reads its parameters differently.
        """
        if (kind := of_bytes(state)) != self.kind:
            refuse_another_kind(self.kind, kind)

    def __getstate__(self) -> dict[str, Any]:
        # The messages hold the prior's objects, and only the constructor uses them.
        return {**self.__dict__, "messages": {}}


def refuse_another_kind(here: str, there: Any) -> NoReturn:
    """Raise a RuntimeError for a state of another guide than one's own, which has its kind."""
    other = there if isinstance(there, str) else "that of another kind of BNN"
    raise RuntimeError(f"the guide is {here} here and {other} in the state dict")


def detached_together(posterior: Mapping[str, td.Distribution]) -> dict[str, td.Distribution]:
    """Return detached copies of distributions; marginals of one joint distribution share a copy."""
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


def _median(q: td.Distribution) -> Tensor:
    inner = without_events(q)
    if isinstance(inner, td.TransformedDistribution):
        return td.ComposeTransform(inner.transforms)(_median(inner.base_dist))
    # Of two values it is the more probable one.
    return q.mode if is_discrete(q.support) else q.mean


def on_support(base: td.Distribution, support: constraints.Constraint) -> td.Distribution:
    """Return the distribution of a real variable that is mapped onto a support.

    On the positive numbers that of a Normal is log-normal, which has moments, and is known to be
    positive: PyTorch's map onto these ends in a shift by 0, whose results may be any number.
    """
    normal, own = as_gaussian(base), elementwise(support)
    bound = None if hasattr(own, "upper_bound") else getattr(own, "lower_bound", None)
    is_positive = bound is not None and bool((torch.as_tensor(bound) == 0).all())
    if normal is None or not is_positive:
        return dist.TransformedDistribution(base, [td.biject_to(support)])
    found = dist.LogNormal(normal.loc, normal.scale, validate_args=False)
    return found.to_event(len(base.event_shape))


def start_of(argument: str, start: Callable[[Any], Tensor], site: Site, message: Any) -> Tensor:
    """Return the start that an initialiser gives to a site; a wrong shape raises."""
    check.one_of(argument, start, Callable, "a function, such as tyxe.guides.init_to_zero")
    found = start(message).detach()
    hint = f", that of the site {site.name!r}"
    return check.shape(f"the start that {argument} gives", found, site.shape, hint)


def weight_covariance(guide: AnyGuide, blocks: ParamBlocks) -> Operator:
    """Return the weights' covariance, in the blocks' order, of a posterior of Normals."""
    posterior = guide.as_priors()
    joint = getattr(next(iter(posterior.values())), "joint", None)
    if isinstance(joint, Gaussian) and set(joint.names) == set(posterior):
        order = torch.arange(joint.loc.numel(), device=joint.loc.device)
        precision = joint.precision
        covariance = precision.operator if isinstance(precision, Inverse) else Inverse(precision)
        return permuted(covariance, blocks.flatten(joint.unflatten(order)))
    variances = {}
    for name, q in posterior.items():
        moments = independent_moments(q)
        if moments is None or center(q) is None:
            raise TypeError(
                f"the posterior of {name!r} is no Normal, so the net cannot be linearised under "
                "it: predict with predictive='bnn', or use tyxe.guides.AutoNormal"
            )
        variances[name] = moments[1].to(moments[0].dtype)
    return Diagonal(at_least_float32(blocks.flatten(variances)))
