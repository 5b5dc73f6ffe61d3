"""The Laplace approximation as a guide: a point estimate that becomes a Gaussian."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe.curvature.collect import Curvature
from tyxe.distributions import (
    GaussianJoint,
    JointNormal,
    detached,
    group_from_state,
    group_state,
    joined,
    separated,
)
from tyxe.distributions.normal import wide
from tyxe.guides.base import detached_together, site_named, sites_of
from tyxe.guides.init import init_to_median
from tyxe.linalg import BlockDiagonal, is_diagonal, operator_from_state, operator_state
from tyxe.util import SiteTensors

__all__ = ["LaplaceGuide", "check_structure"]


class LaplaceGuide(nn.Module):
    """`N(loc, precision^-1)` over all sites at once; a delta at `loc` while it has no precision.

    Without a precision it is the guide of a maximum a posteriori fit.

    Args:
        module: the program that samples the sites from their prior.
        init_loc_fn: where `loc` starts.

    Raises:
        ValueError: a site with a constrained support: the Gaussian lives on all real values.
    """

    def __init__(
        self, module: Callable[..., Any], init_loc_fn: Callable[[Any], Tensor] = init_to_median
    ) -> None:
        super().__init__()
        self.sites, messages = sites_of(module)
        for site in self.sites:
            if not site.is_real:
                raise ValueError(
                    f"the Laplace approximation is a Gaussian, but {site.name!r} has the support "
                    f"{site.support}; hide it, or use VariationalBNN"
                )
        starts = {s.own_name: init_loc_fn(messages[s.name]).detach().clone() for s in self.sites}
        self.locs = SiteTensors(starts, trainable=True)
        self.curvature: Curvature | None = None
        self.precision: BlockDiagonal | None = None
        # What the posterior is to the next task, where that is another than itself.
        self.next_prior: GaussianJoint | None = None

    def values(self) -> dict[str, Tensor]:
        """Return `loc` by the sites' names in the joint model."""
        return {site.name: self.locs[site.own_name] for site in self.sites}

    def draw(self) -> dict[str, Tensor]:
        """Return one draw of all sites."""
        values = self.values()
        if self.precision is None or self.curvature is None:
            return values
        deviation = separated(self.curvature.groups, self.precision.sample())
        return {name: value + deviation[name].to(value.dtype) for name, value in values.items()}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site (a Pyro program); arguments are ignored."""
        return {
            name: pyro.sample(name, dist.Delta(value, event_dim=value.dim()))
            for name, value in self.draw().items()
        }

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return `loc`, by the sites' names in the joint model."""
        return {name: value.detach().clone() for name, value in self.values().items()}

    @torch.no_grad()
    def get_detached_distributions(
        self, site_names: Iterable[str] | None = None
    ) -> dict[str, td.Distribution]:
        """Return the posterior of each site, as `Guide` does: priors to be.

        Where weights are independent, each site has a Normal of its own; else they are marginals
        of one `JointNormal`, or of the penalty that `next_prior` gives.

        Raises:
            RuntimeError: there is no posterior yet.
        """
        if self.precision is None or self.curvature is None:
            raise RuntimeError("there is no posterior yet; call fit, or fit_curvature")
        names = [s.own_name for s in self.sites] if site_names is None else list(site_names)
        sites = {name: site_named(self.sites, name) for name in names}
        prior = self.next_prior or self.joint()
        if isinstance(prior, JointNormal) and is_diagonal(prior.precision):
            scales = separated(prior.groups, prior.precision.inverse_diagonal().sqrt())
            locs = separated(prior.groups, prior.loc)
            normals = {
                n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()
            }
            return {name: detached(normals[site.name]) for name, site in sites.items()}
        marginals = detached_together({n: prior.marginal(n) for n in prior.names})
        return {name: marginals[site.name] for name, site in sites.items()}

    def joint(self) -> JointNormal:
        """Return the posterior over all sites."""
        assert self.precision is not None
        assert self.curvature is not None
        loc = self.loc_vector().detach().to(self.precision.dtype)
        return JointNormal(self.curvature.groups, loc, self.precision)

    def parameter_kinds(self) -> Mapping[str, str]:
        """Return `loc` for every parameter."""
        return {name: "loc" for name, _ in self.named_parameters()}

    def loc_vector(self) -> Tensor:
        """Return `loc` as one vector in the order of the precision, `(P,)`."""
        assert self.curvature is not None
        return joined(self.curvature.groups, self.values())

    # ------------------------------------------------------------------ state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LaplaceGuide:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.curvature is not None:
            operator = self.curvature.operator.map(_keeping_precision(fn))
            self.curvature = dataclasses.replace(self.curvature, operator=operator)
        if self.precision is not None:
            self.precision = self.precision.map(_keeping_precision(fn))
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return curvature and precision as tensors and plain values."""
        if self.curvature is None or self.precision is None:
            return {}
        return {
            "curvature": operator_state(self.curvature.operator),
            "precision": operator_state(self.precision),
            "groups": [group_state(group) for group in self.curvature.groups],
            "numbers": {name: getattr(self.curvature, name) for name in _NUMBERS},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        if not state:
            self.curvature = self.precision = None
            return
        like = next(iter(self.parameters()))
        operators = [
            operator_from_state({k: v.to(wide(like)) for k, v in state[part].items()})
            for part in ("curvature", "precision")
        ]
        assert isinstance(operators[0], BlockDiagonal)
        assert isinstance(operators[1], BlockDiagonal)
        groups = [group_from_state(group) for group in state["groups"]]
        self.curvature = Curvature(operators[0], groups, **state["numbers"])
        self.precision = operators[1]


def _keeping_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Move to another device or float64 only: there are no factorisations in half precision."""

    def moved(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        return tensor.to(found.device) if found.dtype.itemsize < 4 else found

    return moved


def check_structure(state: Mapping[str, Any], structure: str) -> None:
    """Raise if a guide's extra state holds the curvature of another structure.

    Args:
        state: what `LaplaceGuide.get_extra_state` returned; without a curvature it fits any.
        structure: that is expected.

    Raises:
        RuntimeError: it is another.
    """
    if not state:
        return
    found = _structures(state["curvature"], state["groups"])
    if structure not in found:
        raise RuntimeError(
            f"the state dict holds a curvature of structure={found[0]!r}, but this BNN, which was "
            f"left as it was, has structure={structure!r}: build it with structure={found[0]!r}, "
            "or on the other's to_module(), and call fit_curvature(data_loader)"
        )


def _structures(operator: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> tuple[str, ...]:
    """The structures that have such a curvature: without linear maps, `"kron"` is `"diag"`."""
    kinds = {key.rpartition("/")[2].partition(".")[0] for key in operator}
    if kinds == {"dense"}:
        return ("full",)
    if "kronecker" in kinds:
        return ("kron",)
    return ("diag",) if any("weight_shape" in group for group in groups) else ("diag", "kron")


_NUMBERS = ("log_likelihood", "error", "num_targets")
