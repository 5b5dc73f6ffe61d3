"""The inducing-weights guide: a posterior over weights with far fewer parameters than weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor

from tyxe import check
from tyxe.distributions.inducing import (
    HierarchicalInducing,
    InducingU,
    InducingWeights,
    LayerPrior,
    StackedU,
    isotropic_scale,
)
from tyxe.distributions.inducing_formulas import Side, inducing_side
from tyxe.distributions.joint import JointDistribution
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides.base import Guide, Site
from tyxe.guides.inducing_families import (
    Q_INDUCING,
    EnsembleFamily,
    InducingFamily,
    InducingOptions,
    WhitenedU,
)
from tyxe.guides.normal import AutoNormal, capped_log, uncapped
from tyxe.util import SiteTensors, resolve_site_name

Size = int | float | Mapping[str, int | float | None]
Messages = Mapping[str, Any]

SIZES = "an integer, a fraction of each layer's (a float), or a mapping of them by weight"

# The name, among those of layers, of the matrix that stacks all layers' inducing weights.
GLOBAL = "inducing_weights"


class AutoInducing(Guide):
    r"""A posterior over few inducing weights `U` per layer, from which the prior gives `W`.

    `q(W) = int q(W|U) q(U) dU`, `q(W|U) = N(E[W|U], lambda^2 Cov[W|U])`,
    `KL = R(lambda) + KL[q(U) || p(U)]`. A layer with `d_r x d_c` weights (a bias is one more
    column) has `M_r (d_r + 1) + M_c (d_c + 1) + 1` parameters and those of `q(U)`. Sizes are capped
    at the layer's own. A layer stays mean field if inducing weights would not need fewer parameters
    than a mean field, `2 d_r d_c`; so do all sites that are not matrices.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.
        inducing_rows: `M_r`: a number, a fraction of the layer's rows (a float), or a mapping from
            weights' names to either. In a mapping, None leaves a layer mean field, and a number is
            used even if it needs more parameters.
        inducing_cols: `M_c`, in the same forms.
        q_inducing: `"diagonal"` (FFG-U), `"full"` (FCG-U), `"matrix"` (a matrix normal) or
            `"ensemble"`: points; each training step uses one, and predictions cycle through all.
        options: all other options.
        keywords: fields of `InducingOptions`, which replace those of `options`.

    Raises:
        TypeError: sizes that are not numbers; an unknown keyword.
        ValueError: the program has no sites; sizes out of range or missing; an unknown
            `q_inducing`; a prior that is not a zero-mean Normal with one standard deviation for
            each site.

    Reference:
        [T] 4.2; Ritter, Kukla, Zhang, Li, Sparse uncertainty representation in deep learning with
        inducing weights, 2021.

    Example:
        >>> import functools, tyxe, pyro.distributions as dist
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(50, 40), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1),
        ...     functools.partial(AutoInducing, inducing_rows=4, inducing_cols=4))
        >>> sum(p.numel() for p in bnn.net_guide.parameters())  # 4080 for a mean field
        405
    """

    def __init__(
        self,
        module: Callable[..., Any],
        inducing_rows: Size,
        inducing_cols: Size,
        q_inducing: str = "diagonal",
        options: InducingOptions | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(module)
        self.options = replace(options or InducingOptions(), **keywords)
        self.q_inducing = check.choice("q_inducing", q_inducing, Q_INDUCING)
        sizes = {"inducing_rows": inducing_rows, "inducing_cols": inducing_cols}
        self.layers = self._layers(sizes)
        self._stack = _stack_of(self.layers, self.options.hierarchical)
        self._init_maps([*self.layers, *self._stack])
        starts = {layer.name: self._start(layer) for layer in self._stack or self.layers}
        family = EnsembleFamily if q_inducing == "ensemble" else InducingFamily
        self.u = family(Q_INDUCING[q_inducing], starts, self.options)
        held = {name for layer in self.layers for name in layer.prior.block.sites}
        self.rest: Guide | None = None
        if any(site.name not in held for site in self.sites):
            program = poutine.block(module, hide=list(held))
            program.prefix = getattr(module, "prefix", "")
            rest = self.options.mean_field(program)
            expected = (
                "one of tyxe.guides, such as "
                "functools.partial(tyxe.guides.AutoNormal, init_scale=1e-4)"
            )
            self.rest = check.one_of("mean_field's guide", rest, Guide, expected)
        # A builder may be a lambda, which cannot be pickled.
        self.options = self.u.options = replace(self.options, mean_field=AutoNormal)
        self.messages = {}

    def _layers(self, sizes: Mapping[str, Size]) -> list[InducingLayer]:
        """Return the layers that get inducing weights, of sizes by the argument's name."""
        family, options = Q_INDUCING[self.q_inducing], self.options
        found = _find_layers(self.sites, self.messages)
        by_layer = {argument: _by_layer(argument, m, found) for argument, m in sizes.items()}
        is_given = options.everywhere or any(isinstance(m, Mapping) for m in sizes.values())
        layers = []
        for name, (weight, bias) in found.items():
            shape = weight.shape[0], weight.shape[1:].numel() + (bias is not None)
            rows, columns = (
                _size(f"{argument} of {name!r}", m[name], full, options.everywhere)
                for (argument, m), full in zip(by_layer.items(), shape, strict=True)
            )
            if rows is None or columns is None:
                continue
            cost = rows * (shape[0] + 1) + columns * (shape[1] + 1) + 1
            cost += family.count(rows, columns, options)
            if is_given or cost < 2 * shape[0] * shape[1]:
                like = self.messages[weight.name]["value"].new_empty(0)
                prior = _layer_prior(weight, bias, self.messages)
                layers.append(InducingLayer(name, prior, rows, columns, like))
        if not layers:
            listed = " and ".join(f"{argument}={m}" for argument, m in sizes.items())
            raise ValueError(
                f"with {listed} no layer has fewer parameters than a mean field: take smaller "
                "sizes, say everywhere=True, or use tyxe.guides.AutoNormal"
            )
        return layers

    def _init_maps(self, layers: list[InducingLayer]) -> None:
        """Set up `Z ~ N(0, 1/M)`, `D` and `lambda`."""
        options = self.options
        maps: list[dict[str, Tensor]] = [{}, {}]
        for layer in layers:
            for side, m, d in zip(
                maps, (layer.rows, layer.columns), layer.prior.shape, strict=True
            ):
                z = torch.randn(m, d, device=layer.like.device)
                side[layer.name] = z.to(layer.like) / math.sqrt(m)
        log_d = math.log(options.init_residual)
        logs = [{n: torch.full_like(z[:, 0], log_d) for n, z in side.items()} for side in maps]
        self.row_maps, self.column_maps = (SiteTensors(side) for side in maps)
        self.row_scales, self.column_scales = (SiteTensors(side) for side in logs)
        lambdas = {}
        if options.max_lambda != 0:
            start = torch.tensor(options.init_lambda, dtype=torch.float64, device="cpu")
            unconstrained = uncapped(start, options.max_lambda, ("init_lambda", "max_lambda"))
            lambdas = {layer.name: unconstrained.to(layer.like) for layer in layers}
        self.conditional_scales = SiteTensors(lambdas)
        # Masks of the entries that `prune_inducing_` has kept.
        self.kept_rows, self.kept_columns = SiteTensors({}, None), SiteTensors({}, None)

    def _start(self, layer: InducingLayer) -> Tensor:
        """Return the start of the mean of `q(U)`: a draw from the prior."""
        start = torch.randn(layer.rows, layer.columns, device=layer.like.device).to(layer.like)
        if self.options.whitened:
            return start
        with torch.no_grad():
            rows, columns = self.side(layer.name, 0), self.side(layer.name, 1)
            return rows.tril @ start @ columns.tril.mT

    @property
    def kind(self) -> str:
        o = self.options
        return (
            f"{type(self).__name__}({self.q_inducing}, whitened={o.whitened}, "
            f"max_lambda={o.max_lambda}, max_scale_u={o.max_scale_u})"
        )

    def map(self, name: str, side: int) -> Tensor:
        """Return `Z` of a layer's rows (0) or columns (1), with pruned entries zero."""
        maps, kept = ((self.row_maps, self.kept_rows), (self.column_maps, self.kept_columns))[side]
        return maps[name] * kept[name] if name in kept else maps[name]

    def side(self, name: str, side: int) -> Side:
        """Return the factors of `Z Z^T + D^2` for a layer's rows (0) or columns (1)."""
        scales = (self.row_scales, self.column_scales)[side]
        return inducing_side(self.map(name, side), scales[name])

    def _lambda(self, name: str) -> Tensor | None:
        if self.options.max_lambda == 0:
            return None
        return capped_log(self.conditional_scales[name], self.options.max_lambda).exp()

    def _weights(
        self, layer: InducingLayer, u: InducingU, sides: tuple[Side, Side]
    ) -> InducingWeights:
        size = None if layer.name == GLOBAL else self.options.dataset_size
        weight = 1.0 if size is None else min(1.0, size / layer.prior.shape[1])
        scale = self._lambda(layer.name)
        return InducingWeights(u, *sides, scale, layer.prior, weight)

    def joints(self) -> Iterable[JointDistribution]:
        us: dict[str, InducingU] = dict(self.u.distributions())
        sides = {
            layer.name: (self.side(layer.name, 0), self.side(layer.name, 1))
            for layer in (*self.layers, *self._stack)
        }
        if not self.options.whitened:
            us = {n: WhitenedU(u, *(side.tril for side in sides[n])) for n, u in us.items()}
        if not self._stack:
            return [self._weights(q, us[q.name], sides[q.name]) for q in self.layers]
        (top,) = self._stack
        stack = self._weights(top, us[top.name], sides[top.name])
        layers, first = [], 0
        for layer in self.layers:
            u = StackedU(stack, first, first + layer.rows)
            layers.append(self._weights(layer, u, sides[layer.name]))
            first += layer.rows
        return [HierarchicalInducing(layers, stack)]

    def site_distribution(self, site: Site) -> td.Distribution:
        assert self.rest is not None
        return self.rest.site_distribution(self.rest._own(site.own_name))


# --------------------------------------------------------------------------- layers


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


def _find_layers(sites: Iterable[Site], messages: Messages) -> dict[str, tuple[Site, Site | None]]:
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


def _by_layer(argument: str, size: Size, layers: Iterable[str]) -> dict[str, int | float | None]:
    """Return the size of each layer."""
    if not isinstance(size, Mapping):
        return dict.fromkeys(layers, check.one_of(argument, size, int | float, SIZES))
    names = list(layers)
    given = {resolve_site_name(name, names): value for name, value in size.items()}
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(
            f"{argument} has no size for {', '.join(missing)}; give one for every layer's "
            "weight, or None for a layer that stays mean field"
        )
    return given


def _size(name: str, size: Any, full: int, everywhere: bool) -> int | None:
    """Return the size for a layer that has `full` rows (or columns); None for mean field."""
    if size is None:
        return None
    if isinstance(size, float):
        return max(1, round(check.number(name, size, above=0, most=1) * full))
    count = check.count(name, size)
    return count if everywhere else min(count, full)


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


def _stack_of(
    layers: list[InducingLayer], hierarchical: tuple[int, int] | None
) -> list[InducingLayer]:
    """Return the layer, if any, whose weights are the inducing weights of all others."""
    if hierarchical is None:
        return []
    columns = {layer.columns for layer in layers}
    if len(columns) > 1:
        listed = ", ".join(f"{layer.name}: {layer.columns}" for layer in layers)
        raise ValueError(
            "hierarchical inducing weights are stacked, so every layer needs as many columns; "
            f"inducing_cols gives {listed}"
        )
    shape = torch.Size((sum(layer.rows for layer in layers), columns.pop()))
    for size, most in zip(hierarchical, shape, strict=True):
        check.count("a size in hierarchical", size, hint=", the stack's own size", most=most)
    prior = LayerPrior(LinearBlock(GLOBAL, None, shape), (1.0,))
    return [InducingLayer(GLOBAL, prior, *hierarchical, layers[0].like)]
