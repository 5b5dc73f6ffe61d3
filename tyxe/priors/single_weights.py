"""Priors over single weights of a net, in any of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tyxe import check
from tyxe.priors.base import Parameter, Prior
from tyxe.priors.mapping import IIDPrior
from tyxe.priors.sites import SitePrior
from tyxe.rng import fresh_seed
from tyxe.util import resolve_site_name

_KNOWN = ("magnitude", "last", "random")
# Layers whose weights are gains, and not about zero.
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class SubnetworkPrior(Prior):
    """A prior over single weights, of those that another prior exposes; the others stay fixed.

    A site is the vector of a parameter's chosen weights, in the order of the flattened parameter,
    or the parameter itself if all of it is chosen. The other weights keep the values of the given
    net, so train it first. With few weights a posterior can couple all of them, whatever the size
    of the net: `LaplaceBNN(structure="full")`, HMC, a full-rank guide.

    Args:
        prior: the distributions of the chosen weights: any prior whose distributions have a
            tensor's shape.
        num_weights: number of random weights.
        by: which ones: a posterior, as `get_detached_distributions` returns it, for the largest
            marginal variances (`subnetwork` finds one); `"magnitude"` for the largest weights of
            the net, `"last"` for the last ones in the order of its parameters, or `"random"`.

    Raises:
        TypeError: not a prior, or another SubnetworkPrior.
        ValueError: an unknown `by`; fewer weights than 1. When applied to a net: more weights than
            the prior exposes; a posterior that lacks some of its sites.

    Reference:
        Daxberger et al., Bayesian deep learning via subnetwork inference, 2021.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> prior = SubnetworkPrior(tyxe.priors.IIDPrior(dist.Normal(0, 1)), 5, by="last")
        >>> {name: site.event_shape for name, site in prior.sites(nn.Linear(20, 1)).items()}
        {'weight': torch.Size([4]), 'bias': torch.Size([1])}
    """

    def __init__(
        self, prior: Prior, num_weights: int, by: str | Mapping[str, td.Distribution]
    ) -> None:
        self.prior = check.one_of("prior", prior, Prior, "one such as tyxe.priors.IIDPrior(...)")
        if isinstance(prior, SubnetworkPrior):
            raise TypeError(
                f"prior is {prior}, whose choice would be lost; expected a prior of whole tensors: "
                "choose once, among the weights that it exposes"
            )
        self.num_weights = check.count("num_weights", num_weights)
        if not isinstance(by, Mapping):
            hint = (
                ", or a posterior, whose variances are compared, which tyxe.priors.subnetwork(net, "
                "loader, num_weights, likelihood=...) finds itself"
            )
            check.choice("by", by, _KNOWN, hint)
        self.by, self.selection = by, prior.selection
        # The same weights whenever the prior is asked.
        self._seed = fresh_seed()

    def _arguments(self) -> str:
        by = self.by if isinstance(self.by, str) else "variance"
        return f"{self.prior}, {self.num_weights}, by={by!r}"

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> SitePrior:
        return self.prior.prior_dist(name, module, param)

    def elements(self, net: nn.Module) -> dict[str, Tensor]:
        parameters = self.selection.of(net)
        sizes = [parameter.tensor.numel() for parameter in parameters]
        hint = ", the weights that the prior exposes"
        check.count("num_weights", self.num_weights, hint=hint, most=sum(sizes))
        is_chosen = torch.zeros(sum(sizes), dtype=torch.bool, device="cpu")
        is_chosen[self._scores(parameters, sum(sizes)).topk(self.num_weights).indices] = True
        named = zip(parameters, is_chosen.split(sizes), strict=True)
        return {p.name: part.nonzero()[:, 0] for p, part in named if not part.all()}

    def _scores(self, parameters: list[Parameter], size: int) -> Tensor:
        """Return numbers by which weights are compared, `(size,)`, on the CPU."""
        if self.by == "last":
            return torch.arange(size, device="cpu")
        if self.by == "random":
            generator = torch.Generator().manual_seed(self._seed)
            return torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        named = ((p.name, p.tensor.detach()) for p in parameters)
        by_size = self.by == "magnitude"
        found = (tensor.abs() if by_size else self._variance(n, tensor) for n, tensor in named)
        return torch.cat([scores.flatten().cpu() for scores in found])

    def _variance(self, name: str, tensor: Tensor) -> Tensor:
        posterior: Any = self.by
        variance = posterior[resolve_site_name(name, posterior)].variance
        return check.shape(f"the variance of {name!r}", variance, tensor.shape)


@check.arguments
def subnetwork(
    net: nn.Module,
    loader: Iterable[Any] | None,
    num_weights: int,
    by: str = "variance",
    *,
    prior: Prior | None = None,
    likelihood: Any = None,
) -> SubnetworkPrior:
    """Return a prior over single weights of a trained net, whose others stay fixed.

    Args:
        net: the trained net, which is not changed.
        loader: for `"variance"`, yields `(inputs, targets)`, or with weights; otherwise not read.
        num_weights: number of random weights.
        by: which ones: `"variance"`, those of the largest marginal variances under a diagonal
            Laplace approximation; or `"magnitude"`, `"last"` or `"random"`, see `SubnetworkPrior`.
        prior: the distributions of the weights; by default standard Normals of all that are in no
            normalisation layer.
        likelihood: for `"variance"`, the likelihood, whose `dataset_size` scales the curvature.

    Raises:
        TypeError: no likelihood for `"variance"`; a prior that is a SubnetworkPrior.
        ValueError: an unknown `by`; fewer weights than 1, or more than the prior exposes; for
            `"variance"`, a prior that is not Gaussian, or data that do not fit the likelihood.

    Example:
        >>> import tyxe
        >>> net, x = nn.Linear(20, 3), torch.randn(40, 20)
        >>> loader, likelihood = [(x, torch.arange(40) % 3)], tyxe.likelihoods.Categorical(40)
        >>> prior = subnetwork(net, loader, 30, likelihood=likelihood)
        >>> bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure="full")
        >>> bnn.fit_curvature(loader)
        >>> bnn.net_guide.precision.size
        30
    """
    check.choice("by", by, ("variance", *_KNOWN))
    prior = prior or IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=_NORMS)
    found = SubnetworkPrior(prior, num_weights, "last" if by == "variance" else by)
    found.elements(net)  # too many weights are refused before the work
    if by != "variance":
        return found
    return SubnetworkPrior(prior, num_weights, diagonal_posterior(likelihood, net, prior, loader))


@singledispatch
def diagonal_posterior(
    likelihood: Any, net: nn.Module, prior: Prior, loader: Any
) -> Mapping[str, td.Distribution]:
    """Return a posterior of independent weights; `tyxe.bnn`, which is above, registers it."""
    raise TypeError(
        f'likelihood is {check.described(likelihood)}; by="variance" needs that of the net, for '
        "the curvature: likelihood=tyxe.likelihoods.Categorical(len(data)), or such"
    )
