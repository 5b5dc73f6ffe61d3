"""Any Pyro guide in a guide's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from pyro.infer.autoguide import AutoContinuous, AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor, nn

from tyxe.distributions import is_real
from tyxe.guides.base import Guide, detached_together
from tyxe.guides.pyro_joint import independent_sites, joint_normal
from tyxe.util import resolve_site_name

__all__ = ["PyroGuide"]


class PyroGuide(nn.Module):
    """Hold a Pyro autoguide, or any module that is a guide, as a part of a BNN.

    The guide is set up at once, without data, and its parameters live in the module and not in
    Pyro's global store: each call runs under `module_local_params`. `net_guide_builder` wraps
    what it gets in this class by itself.

    Args:
        guide: the guide, built on `module`.
        module: the program that samples the sites from their prior.

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
        """Call a guide's builder on a program, and wrap the guide unless it is one of ours.

        Raises:
            TypeError: the builder returned no module: a function's `pyro.param` would live in
                Pyro's global store, where no BNN trains it.
        """
        if isinstance(builder, nn.Module):
            raise TypeError(
                f"the guide's builder is a {type(builder).__name__} already built; pass its class, "
                "or a functools.partial of it: the BNN builds it on its own sites"
            )
        with pyro.settings.context(module_local_params=True):
            guide = builder(module)
        if isinstance(guide, MCMCKernel):
            raise TypeError(f"{type(guide).__name__} is a kernel; use it with tyxe.MCMC_BNN")
        if isinstance(guide, Guide | PyroGuide):
            return guide
        if not isinstance(guide, nn.Module):
            raise TypeError(
                f"the guide's builder returned a {type(guide).__name__}; expected a module that "
                "holds its parameters, as tyxe.guides.AutoNormal, a class from "
                "pyro.infer.autoguide, or a PyroModule of your own does"
            )
        return cls(guide, module)

    def __init__(self, guide: nn.Module, module: Callable[..., Any]) -> None:
        super().__init__()
        self.guide = guide
        self.prefix = getattr(module, "prefix", "")
        with pyro.settings.context(module_local_params=True):
            self.guide()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Run the guide (a Pyro program); the batch is not passed, sites do not depend on it."""
        with pyro.settings.context(module_local_params=True):
            joint = joint_normal(self.guide)
            if joint is None:
                return self.guide() or {}
        # The same variables as Pyro's, and a KL in closed form.
        return Guide.sample_from({name: joint.marginal(name) for name in joint.names})

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the median of every site, by its name in the joint model.

        Raises:
            TypeError: the guide has no median.
        """
        if not isinstance(self.guide, AutoGuide):
            raise TypeError(
                f"{type(self.guide).__name__} has no median; predict with num_predictions >= 1"
            )
        with pyro.settings.context(module_local_params=True):
            return {name: value.clone() for name, value in self.guide.median().items()}

    def get_detached_distributions(
        self, site_names: Iterable[str] | None = None
    ) -> dict[str, td.Distribution]:
        """Return posteriors per site, where the guide has one, as `Guide` does.

        Those of a guide that is a Normal over all sites are the marginals of one copy of it.

        Raises:
            TypeError: the guide couples its sites otherwise, or is no autoguide.
        """
        posterior = dict(self._posterior())
        sites = {name.removeprefix(self.prefix): name for name in posterior}
        names = list(sites) if site_names is None else list(site_names)
        own = [name.removeprefix(self.prefix) for name in names]
        asked = {n: sites[resolve_site_name(o, sites)] for n, o in zip(names, own, strict=True)}
        found = detached_together({name: posterior[name] for name in asked.values()})
        return {name: found[site] for name, site in asked.items()}

    @torch.no_grad()
    def _posterior(self) -> Mapping[str, td.Distribution]:
        """The posterior of each site by its name in the joint model."""
        with pyro.settings.context(module_local_params=True):
            joint, sites = joint_normal(self.guide), independent_sites(self.guide)
        if joint is not None:
            return {name: joint.marginal(name) for name in joint.names}
        if sites is not None:
            return sites
        if isinstance(self.guide, AutoContinuous) or not isinstance(self.guide, AutoGuide):
            raise TypeError(
                f"{type(self.guide).__name__} has no distribution per site; use "
                "tyxe.guides.AutoNormal where a posterior is to become a prior"
            )
        return dict(self._site_posteriors(self.guide))

    def _site_posteriors(self, guide: AutoGuide) -> Iterator[tuple[str, td.Distribution]]:
        nodes = poutine.trace(self).get_trace().nodes
        for name, node in nodes.items():
            if node["type"] != "sample" or node["infer"].get("is_auxiliary"):
                continue
            # AutoNormal's own sites are deltas at draws of these.
            base = nodes.get(f"{name}_unconstrained")
            if base is None:
                yield name, node["fn"]
            else:
                yield (
                    name,
                    _constrained(base["fn"], guide.prototype_trace.nodes[name]["fn"].support),
                )

    def parameter_kinds(self) -> Mapping[str, str]:
        """Return the kind of each parameter by name, from Pyro's words for them."""
        # Second comes Pyro's word, as in guide.scales.net.0.weight; what follows names the site.
        words = {name: name.split(".")[1] for name, _ in self.named_parameters() if "." in name}
        spread = ("scale", "cov_factor", "cov_diag")
        return {
            name: "scale" if any(part in word for part in spread) else "loc"
            for name, word in words.items()
        }


def _constrained(base: td.Distribution, support: Any) -> td.Distribution:
    return base if is_real(support) else dist.TransformedDistribution(base, [td.biject_to(support)])
