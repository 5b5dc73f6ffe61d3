"""The guide of a Laplace approximation: a point estimate, and a Gaussian once it has a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe import check
from tyxe.curvature import Curvature
from tyxe.distributions import ParamBlocks
from tyxe.distributions.normal import Point
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.files import as_bytes, as_state, of_bytes, of_state
from tyxe.guides.base import AnyGuide, Guide, check_real, refuse_another_kind, sites_of
from tyxe.guides.init import init_to_net
from tyxe.laplace.state import LaplaceState
from tyxe.linalg import BlockDiagonal
from tyxe.util import SiteTensors, at_least_float32, with_float32

_NUMBERS = ("log_likelihood", "error", "num_targets", "key")


class LaplaceGuide(AnyGuide):
    """The Gaussian of a `LaplaceState` over all sites, or a delta at the mode without a state.

    Without a state it is the guide of a maximum a posteriori fit.

    Args:
        module: the program that samples the sites from their prior.
        structure: the structure of its states' curvatures, which is saved with them.

    Attributes:
        state: the approximation, or None.
        loaded: a loaded curvature, to make a state of with the present mode and prior; else None.

    Raises:
        ValueError: a site has a constrained support.
    """

    def __init__(self, module: Callable[..., Any], structure: str) -> None:
        super().__init__()
        self.structure = structure
        self.sites, messages = sites_of(module)
        check_real(self.sites, "the Laplace approximation")
        starts = {s.own_name: init_to_net(messages[s.name]) for s in self.sites}
        self.locs = SiteTensors(starts, trainable=True)
        self.state: LaplaceState | None = None
        self.loaded: Curvature | None = None

    @property
    def precision(self) -> BlockDiagonal:
        """The posterior's precision.

        Raises:
            RuntimeError: there is no posterior yet.
        """
        return self._fitted().precision()

    def _fitted(self) -> LaplaceState:
        return check.known(self.state, "there is no posterior yet; call fit, or fit_curvature")

    def values(self) -> dict[str, Tensor]:
        """Return the mode by the sites' joint names."""
        return {site.name: self.locs[site.own_name] for site in self.sites}

    def draw(self, *count: int) -> dict[str, Tensor]:
        """Return one draw of all sites, or so many of them, `(count, ...)`."""
        values = self.values()
        if self.state is None:
            return {name: value.expand((*count, *value.shape)) for name, value in values.items()}
        deviation = self.state.sample(*count)
        return {name: value + deviation[name].to(value.dtype) for name, value in values.items()}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample all sites (a Pyro program); arguments are ignored."""
        return Guide.sample_from({name: Point(value) for name, value in self.draw().items()})

    def posterior(self) -> dict[str, td.Distribution]:
        """Return the Gaussian's marginals by joint name, or points at the mode without a state."""
        if self.state is None:
            return {name: Point(value) for name, value in self.values().items()}
        return self.state.posterior().by_site()

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return a copy of the mode, by the sites' joint names."""
        return {name: value.detach().clone() for name, value in self.values().items()}

    def as_priors(self) -> Mapping[str, td.Distribution]:
        """Return those of `LaplaceState.next_prior`, which know the curvature they contain."""
        return self._fitted().next_prior().by_site()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LaplaceGuide:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state = self.state.map(with_float32(fn))
        return self

    def get_extra_state(self) -> Tensor:
        """Return the curvature, packed; the BNN saves the prior."""
        if self.state is None:
            return as_bytes({})
        numbers = as_state(self.state.curvature)
        found = {
            "structure": self.structure,
            "curvature": numbers.pop("operator"),
            **numbers.pop("blocks"),
            "numbers": {name: numbers[name] for name in _NUMBERS},
            "by_noise": numbers["by_noise"],
        }
        return as_bytes(found)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the curvature of `get_extra_state`; another structure is a RuntimeError."""
        self.state = self.loaded = None
        if not isinstance(saved := of_bytes(state), dict):
            refuse_another_kind("that of a LaplaceBNN", saved)
        if not saved:
            return
        found, layout = saved["structure"], {"blocks": saved["blocks"]}
        blocks = of_state(ParamBlocks, layout)
        # Without linear maps, "kron" and "diag" are the same.
        is_linear = any(isinstance(block, LinearBlock) for block in blocks)
        if found != self.structure and (is_linear or {found, self.structure} != {"kron", "diag"}):
            raise RuntimeError(
                f"the state dict holds a curvature of structure={found!r}, but this BNN has "
                f"structure={self.structure!r}: build it with structure={found!r}, or on the "
                "other's to_module(), and call fit_curvature(data_loader)"
            )
        known, own = set(blocks.sites), {site.name for site in self.sites}
        if known != own:
            raise RuntimeError(
                f"the state dict holds a curvature of {min(known)!r} and others, but this BNN has "
                f"{min(own)!r} and others: give it the same net and name"
            )
        like = at_least_float32(next(iter(self.parameters())))
        # States of earlier versions have nothing by noise.
        given = {"operator": saved["curvature"], "by_noise": saved.get("by_noise")}
        given = tree_map(lambda leaf: leaf.to(like) if isinstance(leaf, Tensor) else leaf, given)
        self.loaded = of_state(Curvature, {**given, "blocks": layout, **saved["numbers"]})
