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
from tyxe.distributions.inducing import InducingWeights, LayerPrior
from tyxe.distributions.inducing_formulas import Side, inducing_side
from tyxe.distributions.inducing_hierarchy import HierarchicalInducing, StackedU
from tyxe.distributions.inducing_u import InducingU, WhitenedU
from tyxe.distributions.joint import JointDistribution
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides.base import Guide, Site
from tyxe.guides.inducing_sizes import InducingLayer, Size, inducing_layers
from tyxe.guides.inducing_u import Q_INDUCING, FamilyOptions
from tyxe.guides.normal import AutoNormal, capped_log, uncapped
from tyxe.util import SiteTensors, resolve_site_name

# The name, among those of layers, of the matrix that stacks all layers' inducing weights.
GLOBAL = "inducing_weights"


@dataclass(frozen=True)
class InducingOptions:
    """Options of `AutoInducing`, which also takes each of them as a keyword.

    Attributes:
        ensemble_size: members of `q_inducing="ensemble"`; with 1, a point estimate of `U`.
        whitened: `q` is over `U_w = C_r^-1 U C_c^-T`, whose prior is `N(0, 1)`.
        init_lambda: start of the scale of the conditional posterior.
        max_lambda: its cap; 0 makes weights a function of `U` (and leaves `R(lambda)` out).
        init_scale_u: start of the standard deviations of `U`.
        max_scale_u: their cap.
        init_residual: start of `D`, in the prior covariance `Z Z^T + D^2` of `U`.
        ensemble_spread: standard deviation of the noise between members at the start.
        everywhere: give inducing weights of exactly these sizes to every layer.
        hierarchical: `(rows, columns)` of one global matrix above the stacked `U` of all layers.
        dataset_size: weigh `R(lambda)` by `min(1, N / columns)`, the function-space form.
        mean_field: builds the guide of the sites without inducing weights.

    Raises:
        ValueError: a number out of range, or `hierarchical` inducing weights that are not whitened.
    """

    ensemble_size: int = 5
    whitened: bool = True
    init_lambda: float = 1e-3
    max_lambda: float | None = None
    init_scale_u: float = math.sqrt(1e-3)
    max_scale_u: float | None = None
    init_residual: float = 1e-3
    ensemble_spread: float = 0.1
    everywhere: bool = False
    hierarchical: tuple[int, int] | None = None
    dataset_size: int | None = None
    mean_field: Callable[[Callable[..., Any]], Any] = AutoNormal

    def __post_init__(self) -> None:
        for name in ("ensemble_size", "dataset_size"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if self.max_lambda is not None and not self.max_lambda >= 0:
            raise ValueError(f"max_lambda is {self.max_lambda}; expected 0 or a positive number")
        for name in ("max_scale_u", "init_residual"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; expected a positive number")
        if self.hierarchical is not None and not self.whitened:
            raise ValueError("hierarchical inducing weights stack whitened ones: whitened=True")

    @property
    def family(self) -> FamilyOptions:
        """The options of the families of `q(U)`."""
        return FamilyOptions(
            self.init_scale_u, self.max_scale_u, self.ensemble_size, self.ensemble_spread
        )


class AutoInducing(Guide):
    r"""A posterior over few inducing weights `U` per layer, from which the prior gives `W`.

    `q(W) = int q(W|U) q(U) dU`, `q(W|U) = N(E[W|U], lambda^2 Cov[W|U])`, `KL = R(lambda) +
    KL[q(U) || p(U)]`. A layer with `d_r x d_c` weights (a bias is one more column) has `M_r (d_r +
    1) + M_c (d_c + 1) + 1` parameters and those of `q(U)`. Sizes are capped at the layer's own. A
    layer stays mean field where inducing weights would need no fewer parameters than its mean
    field, `2 d_r d_c`; so do all sites that are no matrices.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.
        inducing_rows: `M_r`: a number, a fraction of the layer's rows (a float), or a mapping from
            weights' names to either. In a mapping None leaves a layer mean field, and a number is
            used even where it needs more parameters.
        inducing_cols: `M_c`, in the same forms.
        q_inducing: `"diagonal"` (FFG-U), `"full"` (FCG-U), `"matrix"` (a matrix normal) or
            `"ensemble"`: points, of which a training step uses one and predictions all in turn.
        options: all else.
        keywords: fields of `InducingOptions`, instead of `options`.

    Raises:
        TypeError: sizes that are no numbers; an unknown keyword.
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
        if options is not None and keywords:
            raise TypeError(f"{', '.join(keywords)} given besides options; put all into one")
        self.options = InducingOptions(**keywords) if options is None else options
        check.choice("q_inducing", q_inducing, Q_INDUCING)
        self.q_inducing = q_inducing
        family, size = Q_INDUCING[q_inducing], self.options.ensemble_size
        self.layers = inducing_layers(
            self.sites,
            self.messages,
            (inducing_rows, inducing_cols),
            self.options.everywhere,
            lambda rows, columns: family.count(rows, columns, size),
        )
        self._stack = _stack_of(self.layers, self.options.hierarchical)
        self._init_maps([*self.layers, *self._stack])
        tops = self._stack or self.layers
        self.u = family({layer.name: self._start(layer) for layer in tops}, self.options.family)
        held = {name for layer in self.layers for name in layer.prior.block.sites}
        rest = _Subset(module, held)
        has_rest = any(site.name not in held for site in self.sites)
        self.rest = _check_rest(self.options.mean_field(rest)) if has_rest else None
        # A builder may be a lambda, which cannot be pickled.
        self.options = replace(self.options, mean_field=AutoNormal)
        self.messages = {}

    def _init_maps(self, layers: list[InducingLayer]) -> None:
        """Set up `Z ~ N(0, 1/M)`, `D` and `lambda`."""
        options = self.options
        maps: list[dict[str, Tensor]] = [{}, {}]
        for layer in layers:
            for side, m, d in zip(
                maps, (layer.rows, layer.columns), layer.prior.shape, strict=True
            ):
                side[layer.name] = torch.randn(m, d).to(layer.like) / math.sqrt(m)
        log_d = math.log(options.init_residual)
        logs = [{n: torch.full_like(z[:, 0], log_d) for n, z in side.items()} for side in maps]
        self.row_maps, self.column_maps = (SiteTensors(side) for side in maps)
        self.row_scales, self.column_scales = (SiteTensors(side) for side in logs)
        lambdas = {}
        if options.max_lambda != 0:
            start = torch.tensor(options.init_lambda, dtype=torch.float64)
            unconstrained = uncapped(start, options.max_lambda, ("init_lambda", "max_lambda"))
            lambdas = {layer.name: unconstrained.to(layer.like) for layer in layers}
        self.conditional_scales = SiteTensors(lambdas)
        # Masks of the entries that `prune_inducing_` has kept.
        self.kept_rows, self.kept_columns = SiteTensors({}, None), SiteTensors({}, None)

    def _start(self, layer: InducingLayer) -> Tensor:
        """Return the start of the mean of `q(U)`: a draw from the prior."""
        start = torch.randn(layer.rows, layer.columns).to(layer.like)
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
        return inducing_side(
            self.map(name, side), (self.row_scales, self.column_scales)[side][name]
        )

    def get_lambda(self, site_name: str) -> Tensor:
        """Return the scale of a layer's conditional posterior, by its weight's name.

        Raises:
            ValueError: the site has no inducing weights, or is a bias.
        """
        found = self._lambda(resolve_site_name(site_name, self.row_maps))
        return torch.zeros(()) if found is None else found

    def _lambda(self, name: str) -> Tensor | None:
        if self.options.max_lambda == 0:
            return None
        return capped_log(self.conditional_scales[name], self.options.max_lambda).exp()

    def _weights(
        self, layer: InducingLayer, u: InducingU, rows: Side, columns: Side
    ) -> InducingWeights:
        size = None if layer.name == GLOBAL else self.options.dataset_size
        weight = 1.0 if size is None else min(1.0, size / layer.prior.shape[1])
        scale = self._lambda(layer.name)
        return InducingWeights(u, rows, columns, scale, layer.prior, weight)

    def joints(self) -> Iterable[JointDistribution]:
        us = self.u.distributions()
        sides = {
            layer.name: (self.side(layer.name, 0), self.side(layer.name, 1))
            for layer in (*self.layers, *self._stack)
        }
        if not self.options.whitened:
            us = {n: WhitenedU(u, sides[n][0].tril, sides[n][1].tril) for n, u in us.items()}
        if not self._stack:
            return [self._weights(q, us[q.name], *sides[q.name]) for q in self.layers]
        (top,) = self._stack
        stack = self._weights(top, us[top.name], *sides[top.name])
        layers, first = [], 0
        for layer in self.layers:
            u = StackedU(stack, first, first + layer.rows)
            layers.append(self._weights(layer, u, *sides[layer.name]))
            first += layer.rows
        return [HierarchicalInducing(layers, stack)]

    def site_distribution(self, site: Site) -> td.Distribution:
        assert self.rest is not None
        return self.rest.site_distribution(self.rest._own(site.own_name))

    def parameter_kinds(self) -> Mapping[str, str]:
        kinds = {
            name: "scale" if any("scale" in part for part in name.split(".")[:2]) else "loc"
            for name, _ in self.named_parameters()
        }
        rest = {} if self.rest is None else self.rest.parameter_kinds()
        return {**kinds, **{f"rest.{name}": kind for name, kind in rest.items()}}


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
    if not all(1 <= m <= d for m, d in zip(hierarchical, shape, strict=True)):
        raise ValueError(
            f"hierarchical is {hierarchical}; expected from 1 to the stack's size {tuple(shape)}"
        )
    prior = LayerPrior(LinearBlock(GLOBAL, None, shape), (1.0,))
    return [InducingLayer(GLOBAL, prior, *hierarchical, layers[0].like)]


class _Subset:
    """The program of the sites that have no inducing weights."""

    def __init__(self, module: Callable[..., Any], held: set[str]) -> None:
        self.module = poutine.block(module, hide=list(held))
        self.prefix = getattr(module, "prefix", "")

    def __call__(self) -> Any:
        return self.module()


def _check_rest(guide: Any) -> Guide:
    if not isinstance(guide, Guide):
        raise TypeError(
            f"mean_field built a {type(guide).__name__}; expected one of tyxe.guides, such as "
            "functools.partial(tyxe.guides.AutoNormal, init_scale=1e-4)"
        )
    return guide
