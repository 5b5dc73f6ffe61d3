"""The layers that get inducing weights, and the number of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tyxe.distributions.inducing import LayerPrior, isotropic_scale
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides.base import Site
from tyxe.util import resolve_site_name

Size = int | float | Mapping[str, int | float | None]
Messages = Mapping[str, Any]


@dataclass(frozen=True)
class InducingLayer:
    """A layer with `rows x columns` inducing weights, by its weight's own name.

    `like` has the dtype and device that its parameters start with.
    """

    name: str
    prior: LayerPrior
    rows: int
    columns: int
    like: Tensor


def find_layers(sites: Iterable[Site], messages: Messages) -> dict[str, tuple[Site, Site | None]]:
    """Return the net's weights of two dimensions or more, each with its bias if that is a site.

    The rows of a transposed convolution's matrix are its inputs, so its bias is not part of it.
    """
    own = {site.own_name: site for site in sites}
    found = {}
    for name, site in own.items():
        fans = messages[site.name]["infer"].get("fans")
        if len(site.shape) < 2 or fans is None:
            continue
        owner, dot, attribute = name.rpartition(".")
        bias = own.get(owner + dot + attribute.replace("weight", "bias"))
        fits = bias is not None and bias is not site and bias.shape == site.shape[:1]
        found[name] = site, bias if fits and fans[0] == site.shape[1:].numel() else None
    return found


def inducing_layers(
    sites: Iterable[Site],
    messages: Messages,
    sizes: tuple[Size, Size],
    everywhere: bool,
    count_u: Callable[[int, int], int],
) -> list[InducingLayer]:
    """Return the layers that get inducing weights; sizes and errors are those of `AutoInducing`.

    `count_u` gives the number of parameters of `q(U)` from its rows and columns.
    """
    found = find_layers(sites, messages)
    known = [
        _ByLayer(size, argument, list(found), everywhere)
        for size, argument in zip(sizes, ("inducing_rows", "inducing_cols"), strict=True)
    ]
    layers = []
    for name, (weight, bias) in found.items():
        shape = weight.shape[0], weight.shape[1:].numel() + (bias is not None)
        rows, columns = (side.of(name, d) for side, d in zip(known, shape, strict=True))
        if rows is None or columns is None:
            continue
        given = everywhere or any(side.is_mapping for side in known)
        cost = rows * (shape[0] + 1) + columns * (shape[1] + 1) + 1 + count_u(rows, columns)
        if given or cost < 2 * shape[0] * shape[1]:
            like = messages[weight.name]["value"].new_empty(0)
            prior = _layer_prior(weight, bias, messages)
            layers.append(InducingLayer(name, prior, rows, columns, like))
    if not layers:
        raise ValueError(
            f"with inducing_rows={sizes[0]} and inducing_cols={sizes[1]} no layer has fewer "
            "parameters than a mean field: take smaller sizes, say everywhere=True, or use "
            "tyxe.guides.AutoNormal"
        )
    return layers


class _ByLayer:
    """A size as the user gave it, for all layers or by layer."""

    def __init__(self, size: Size, argument: str, layers: list[str], everywhere: bool) -> None:
        self.argument, self.everywhere = argument, everywhere
        self.is_mapping = isinstance(size, Mapping)
        self.sizes: dict[str, Any] = dict.fromkeys(layers, size)
        if isinstance(size, Mapping):
            given = {resolve_site_name(name, layers): value for name, value in size.items()}
            missing = [name for name in layers if name not in given]
            if missing:
                raise ValueError(
                    f"{argument} has no size for {', '.join(missing)}; give one for every layer's "
                    "weight, or None for a layer that stays mean field"
                )
            self.sizes = given

    def of(self, name: str, full: int) -> int | None:
        """Return the size for a layer that has `full` rows (or columns); None for mean field."""
        size = self.sizes[name]
        if size is None and self.is_mapping:
            return None
        where = f"{self.argument} is {size!r} for {name!r}"
        if isinstance(size, bool) or not isinstance(size, int | float):
            raise TypeError(f"{where}; expected an integer, or a fraction of the layer's {full}")
        if isinstance(size, float):
            if not 0 < size <= 1:
                raise ValueError(f"{where}; a float is a fraction, above 0 and up to 1")
            return max(1, round(size * full))
        if size < 1:
            raise ValueError(f"{where}; expected at least 1")
        if size <= full or self.everywhere:
            return size
        if self.is_mapping:
            raise ValueError(
                f"{where}, which has only {full}; take at most that, or say everywhere=True"
            )
        return full


def _layer_prior(weight: Site, bias: Site | None, messages: Messages) -> LayerPrior:
    sites = [weight] if bias is None else [weight, bias]
    scales = tuple(_prior_scale(site, messages[site.name]) for site in sites)
    block = LinearBlock(weight.name, None if bias is None else bias.name, weight.shape)
    return LayerPrior(block, scales)


def _prior_scale(site: Site, message: Any) -> float:
    # Under a hierarchy, what the message holds is the prior of one draw.
    fixed = not message["infer"].get("is_drawn_anew")
    scale = isotropic_scale(message["fn"]) if fixed else None
    if scale is None:
        raise ValueError(
            "inducing weights need a zero-mean Normal prior with one fixed standard deviation for "
            f"each site, which {site.own_name!r} has not: use such a prior "
            "(tyxe.priors.LayerwiseNormalPrior is one), or give the layer's size as None"
        )
    return scale
