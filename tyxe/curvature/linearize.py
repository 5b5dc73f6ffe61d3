"""A net's outputs at one value of its sites, and their gradients for each data point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Size, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from tyxe.curvature.groups import find_groups, inputs_of
from tyxe.curvature.layout import (
    PLAIN,
    Layout,
    is_plain,
    laid_out,
    layout_of,
    own_layout,
    some_points,
)
from tyxe.curvature.memory import check_memory
from tyxe.curvature.per_point import (
    Objective,
    Substituted,
    looped_gradients,
    vectorized_gradients,
)
from tyxe.curvature.uses import Use, UseRecorder, positions
from tyxe.distributions import Group, LinearGroup
from tyxe.distributions.normal import wide

__all__ = [
    "FactoredRows",
    "Linearization",
    "PlainRows",
    "Rows",
    "check_is_tensor",
    "full_precision",
    "linearized",
]

RunNet = Callable[[Mapping[str, Tensor], Any], Tensor]
# Nets that torch.vmap has refused: it is not tried for every column of every batch.
_NOT_VECTORIZED: WeakSet[nn.Module] = WeakSet()

PerPoint = Callable[[Objective, Mapping[str, Tensor], Any, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class FactoredRows:
    """Gradients of one cotangent in a linear group: `sum_t g_nt a_nt^T` for each point.

    Attributes:
        a: what the weights multiply, `(n, R, groups, columns)`.
        g: the gradient in the map's output, `(n, R, groups, outputs)`.
    """

    a: Tensor
    g: Tensor

    def dense(self) -> Tensor:
        """Return the gradients themselves, `(n, P)`."""
        return torch.einsum("nrgo,nrgi->ngoi", self.g, self.a).flatten(1)


@dataclass(frozen=True)
class PlainRows:
    """Gradients of one cotangent in a group without factors, `(n, P)`."""

    matrix: Tensor

    def dense(self) -> Tensor:
        """Return the gradients themselves, `(n, P)`."""
        return self.matrix


Rows = FactoredRows | PlainRows


class Linearization:
    """The forward on one batch, and the gradients of its outputs point by point.

    In a linear map used once or at several positions, the gradient of a point is a sum of outer
    products of an input and a pre-activation gradient, and one backward has them for all points:
    the points of a batch must not influence each other (so BatchNorm runs in eval mode). Other
    sites take a gradient for each point.

    Args:
        run_net: runs the net with values in its sites' places.
        values: of the sites, by name.
        inputs: a batch.
        shapes: of the sites that are asked for.
        per_point: takes gradients point by point, where there are no factors.
        substituted: puts values in the sites' places, for parts of the net that run again in the
            backward (activation checkpoints).

    Attributes:
        outputs: the net's, in float32 at least, `(n, ...)`.
        groups: of the sites, in their order.

    Raises:
        TypeError: the net returns no tensor.
    """

    def __init__(
        self,
        run_net: RunNet,
        values: Mapping[str, Tensor],
        inputs: Any,
        shapes: Mapping[str, Size],
        per_point: PerPoint,
        substituted: Substituted,
    ) -> None:
        self._per_point, self._substituted = per_point, substituted
        self._run_net, self._values, self._inputs = run_net, values, inputs
        with torch.enable_grad(), UseRecorder() as recorder:
            raw = run_net(values, inputs)
            check_is_tensor(raw)
            self.outputs = wide(raw)
        self._node = raw.grad_fn
        self._autocast = _autocast_like(raw)
        self.points = raw.shape[:1].numel()
        self.groups = find_groups(shapes, recorder.uses, recorder.elsewhere)
        self._recorded = recorder.uses
        self._located: dict[str, list[Use]] | None = None

    def find_layouts(self, known: list[Layout | None] | None = None) -> list[Layout | None]:
        """Find where each map holds the points, but where it is known; None where it did not show.

        Args:
            known: what another batch has found.

        Raises:
            ValueError: a map does not keep the points apart.
        """
        count = len(self._recorded)
        found: list[Layout | None] = [None] * count
        if known is not None and len(known) == count:
            found = list(known)
        asked = [
            index for index, use in enumerate(self._recorded) if self._is_open(use, found[index])
        ]
        uses = [self._recorded[index] for index in asked]
        # Where the points may be elsewhere, those that were not asked are asked as well.
        plain = all(is_plain(use, self.points) for use in uses)
        queries = [some_points(self.outputs.detach(), first) for first in range(1 if plain else 2)]
        gradients = [list(self._gradients(uses, query)) for query, _ in queries if uses]
        layouts = [
            own_layout(use) if layout in (None, PLAIN) else layout
            for use, layout in zip(self._recorded, found, strict=True)
        ]
        for index, use, *each in zip(asked, uses, *gradients, strict=True):
            answers = [(g, which) for g, (_, which) in zip(each, queries, strict=True)]
            layouts[index], found[index] = layout_of(use, self.points, answers)
        self._located = _by_group(self.groups, [*map(laid_out, self._recorded, layouts)])
        return found

    def _is_open(self, use: Use, known: Layout | None) -> bool:
        if self.points < 2 or self._is_last(use):
            return False
        return known is None or (known == PLAIN and not is_plain(use, self.points))

    @property
    def _uses(self) -> dict[str, list[Use]]:
        if self._located is None:
            self.find_layouts()
        assert self._located is not None
        return self._located

    @functools.cached_property
    def _a(self) -> dict[str, Tensor]:
        # Not before the outputs were looked at: those of another number of points have no factors.
        return {name: self._inputs_of(name) for name in self._uses}

    def _inputs_of(self, name: str) -> Tensor:
        (group,) = [g for g in self.groups if g.name == name]
        assert isinstance(group, LinearGroup)
        parts = [wide(inputs_of(group, use, self.points)) for use in self._uses[name]]
        return _joined(parts).detach()

    def rows(self, cotangent: Tensor) -> dict[str, Rows]:
        """Return, for each group, the gradient of every point's `cotangent . outputs`.

        Args:
            cotangent: of the outputs' shape.
        """
        found = self._gradients([use for uses in self._uses.values() for use in uses], cotangent)
        rows: dict[str, Rows] = {}
        for group in self.groups:
            if isinstance(group, LinearGroup):
                uses = self._uses[group.name]
                g = _joined([positions(wide(next(found)), u, self.points) for u in uses])
                rows[group.name] = FactoredRows(self._a[group.name], g)
        rest = [group for group in self.groups if group.name not in rows]
        rows.update(self._plain_rows(rest, cotangent))
        return {group.name: rows[group.name] for group in self.groups}

    def _gradients(self, uses: list[Use], cotangent: Tensor) -> Iterator[Tensor]:
        """The gradient in each map's output."""
        at = [use.probe for use in uses if not self._is_last(use)]
        grads: tuple[Tensor | None, ...] = (None,) * len(at)
        if at and self.outputs.requires_grad:
            # An activation checkpoint runs again, and is to save what it has saved.
            with UseRecorder(), self._substituted(self._values):
                grads = torch.autograd.grad(
                    self.outputs,
                    at,
                    cotangent.to(self.outputs.dtype),
                    retain_graph=True,
                    allow_unused=True,
                )
        found = iter(grads)
        for use in uses:
            grad = cotangent if self._is_last(use) else next(found)
            yield torch.zeros_like(use.probe) if grad is None else grad

    def _is_last(self, use: Use) -> bool:
        """Whether the map's output is the net's, so that there is nothing to differentiate."""
        return use.node is not None and use.node is self._node

    def _plain_rows(self, groups: list[Group], cotangent: Tensor) -> dict[str, Rows]:
        sites = {site: self._values[site].detach() for group in groups for site in group.sites}
        if not sites:
            return {}
        check_memory(
            f"the gradients of {self.points} points in {', '.join(sites)}",
            self.points * sum(wide(site).nbytes for site in sites.values()),
            "take smaller batches, or hide these sites from the prior",
        )

        def objective(sites: Mapping[str, Tensor], row: Any, weight: Tensor) -> Tensor:
            # PyTorch's fused attention kernels, which torch.vmap does not take, stand aside: the
            # transformer's while any mode is active.
            with BaseTorchFunctionMode(), sdpa_kernel(SDPBackend.MATH), self._autocast():
                outputs = self._run_net({**self._values, **sites}, row)
            return (outputs[0] * weight).sum()

        found = self._per_point(objective, sites, self._inputs, cotangent)
        return {
            group.name: PlainRows(wide(torch.cat([found[s].flatten(1) for s in group.sites], 1)))
            for group in groups
        }


def _autocast_like(output: Tensor) -> Callable[[], AbstractContextManager[Any]]:
    """What runs the net again as it has run now."""
    kind = output.device.type
    return functools.partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
    )


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Let nothing be computed in half precision, as the net may be: sums are no place for it.

    Args:
        tensor: on the device in question.
    """
    return torch.autocast(tensor.device.type, enabled=False)


def check_is_tensor(outputs: Any) -> None:
    """Raise unless a net's output can be observed as it is.

    Raises:
        TypeError: it is a tuple, a mapping, ...
    """
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"the net returns a {type(outputs).__name__}; the likelihood needs a tensor: wrap the "
            "net in a module that returns the one to be observed, or use PytorchBNN with a loss "
            "of your own"
        )


def linearized(
    net: nn.Module,
    run_net: RunNet,
    values: Mapping[str, Tensor],
    inputs: Any,
    shapes: Mapping[str, Size],
    substituted: Substituted,
) -> Linearization:
    """Linearise a net on a batch, in the way that its modules allow.

    Args:
        net: the net itself.
        run_net: as in `Linearization`, like all that follow.
        values: of the sites.
        inputs: a batch.
        shapes: of the sites that are asked for.
        substituted: puts values in the sites' places.
    """

    def run_frozen(values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        with _frozen(net):
            return run_net(values, inputs)

    def per_point(
        objective: Objective, sites: Mapping[str, Tensor], inputs: Any, cotangent: Tensor
    ) -> dict[str, Tensor]:
        # Inside of torch.vmap nothing can be frozen any more.
        with _frozen(net):
            if net not in _NOT_VECTORIZED:
                try:
                    return vectorized_gradients(objective, sites, inputs, cotangent)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # Fused recurrent kernels, writes into fresh buffers, hooks of saved tensors:
                    # what torch.func does not take. An error of the net's own comes again.
                    pass
            found = looped_gradients(
                objective, sites, inputs, cotangent, lambda at: substituted({**values, **at})
            )
            _NOT_VECTORIZED.add(net)
            return found

    @contextmanager
    def substituted_frozen(values: Mapping[str, Tensor]) -> Iterator[None]:
        with _frozen(net), substituted(values):
            yield

    return Linearization(run_frozen, values, inputs, shapes, per_point, substituted_frozen)


@contextmanager
def _frozen(net: nn.Module) -> Iterator[None]:
    """Let no parameter require a gradient: a graph then starts at the first site."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _joined(parts: list[Tensor]) -> Tensor:
    """Positions of all uses; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _by_group(groups: list[Group], uses: list[Use]) -> dict[str, list[Use]]:
    owner = {site: g.name for g in groups if isinstance(g, LinearGroup) for site in g.sites}
    found: dict[str, list[Use]] = {g.name: [] for g in groups if isinstance(g, LinearGroup)}
    for use in uses:
        names = {owner[site] for site in use.sites if site in owner}
        for name in names:
            found[name].append(use)
    return found
