"""A net's outputs at one value of its sites, and their gradients for each data point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_map

from tyxe.curvature.groups import find_groups, inputs_of
from tyxe.curvature.uses import Use, UseRecorder, positions
from tyxe.distributions import Group, LinearGroup
from tyxe.distributions.normal import wide

__all__ = [
    "FactoredRows",
    "Linearization",
    "PlainRows",
    "Rows",
    "check_is_tensor",
    "is_constant",
    "linearized",
]

RunNet = Callable[[Mapping[str, Tensor], Any], Tensor]
Objective = Callable[[Mapping[str, Tensor], Any, Tensor], Tensor]
PerPoint = Callable[[Objective, Mapping[str, Tensor], Any, Tensor], dict[str, Tensor]]

# Elements of per-point gradients that are held at a time.
BUDGET = 2**24


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
    ) -> None:
        self._per_point = per_point
        self._run_net, self._values, self._inputs = run_net, values, inputs
        with torch.enable_grad(), UseRecorder() as recorder:
            raw = run_net(values, inputs)
        check_is_tensor(raw)
        self.outputs = wide(raw)
        self._node = raw.grad_fn
        self.points = raw.shape[:1].numel()
        self.groups = find_groups(shapes, recorder.uses, recorder.elsewhere)
        self._uses = _by_group(self.groups, recorder.uses)

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

        def objective(sites: Mapping[str, Tensor], row: Any, weight: Tensor) -> Tensor:
            # PyTorch's fused attention kernels, which torch.vmap does not take, stand aside: the
            # transformer's while any mode is active.
            with BaseTorchFunctionMode(), sdpa_kernel(SDPBackend.MATH):
                outputs = self._run_net({**self._values, **sites}, row)
            return (outputs[0] * weight).sum()

        found = self._per_point(objective, sites, self._inputs, cotangent)
        return {
            group.name: PlainRows(wide(torch.cat([found[s].flatten(1) for s in group.sites], 1)))
            for group in groups
        }


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


def vectorized_gradients(
    objective: Objective, sites: Mapping[str, Tensor], inputs: Any, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return the gradients in the sites for each point, by torch.vmap in bounded chunks.

    Args:
        objective: of the sites' values, a batch of one point, and its row of the cotangent.
        sites: where.
        inputs: a batch; what has no rows, such as a number or None, is the same for all points.
        cotangent: of the outputs' shape.

    Returns:
        `(n, *shape)` for each site.
    """
    dims = tree_map(lambda leaf: 0 if _has_rows(leaf) else None, inputs)

    def on_row(sites: dict[str, Tensor], row: Any, weight: Tensor) -> Tensor:
        batch = tree_map(lambda leaf, dim: leaf if dim is None else leaf[None], row, dims)
        return objective(sites, batch, weight)

    size = sum(value.numel() for value in sites.values())
    gradients = torch.vmap(
        torch.func.grad(on_row), in_dims=(None, dims, 0), chunk_size=max(1, BUDGET // size)
    )
    found: dict[str, Tensor] = gradients(dict(sites), inputs, cotangent)
    return found


def looped_gradients(
    objective: Objective, sites: Mapping[str, Tensor], inputs: Any, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return likewise, point by point, for nets whose kernels torch.vmap does not take."""
    found: dict[str, list[Tensor]] = {name: [] for name in sites}
    for n, weight in enumerate(cotangent):
        at = {name: value.detach().requires_grad_() for name, value in sites.items()}
        with torch.enable_grad():
            row = tree_map(lambda x, n=n: x[n : n + 1] if _has_rows(x) else x, inputs)
            value = objective(at, row, weight)
        grads = torch.autograd.grad(value, list(at.values()), allow_unused=True)
        for name, grad in zip(at, grads, strict=True):
            found[name].append(torch.zeros_like(at[name]) if grad is None else grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def is_constant(argument: Any) -> bool:
    """Say whether all points share an argument of the net: a number, a string or None.

    Example:
        >>> is_constant(3), is_constant(torch.tensor(3.0)), is_constant(torch.zeros(3))
        (True, True, False)
    """
    if isinstance(argument, Tensor):
        return argument.dim() == 0
    return isinstance(argument, bool | int | float | str | None)


def _has_rows(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) and not is_constant(leaf):
        raise TypeError(
            "sites outside of linear maps take a gradient for each point, and a "
            f"{type(leaf).__name__} has no rows to take apart: pass the net tensors, or hide these "
            "sites from the prior"
        )
    return not is_constant(leaf)


def linearized(
    net: nn.Module,
    run_net: RunNet,
    values: Mapping[str, Tensor],
    inputs: Any,
    shapes: Mapping[str, Size],
) -> Linearization:
    """Linearise a net on a batch, in the way that its modules allow.

    Args:
        net: the net itself.
        run_net: as in `Linearization`, like all that follow.
        values: of the sites.
        inputs: a batch.
        shapes: of the sites that are asked for.
    """
    fused = any(isinstance(module, nn.RNNBase | nn.TransformerEncoder) for module in net.modules())
    per_point = looped_gradients if fused else vectorized_gradients

    def run_frozen(values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        with _frozen(net):
            return run_net(values, inputs)

    def per_point_frozen(
        objective: Objective, sites: Mapping[str, Tensor], inputs: Any, cotangent: Tensor
    ) -> dict[str, Tensor]:
        # Inside of torch.vmap nothing can be frozen any more.
        with _frozen(net):
            return per_point(objective, sites, inputs, cotangent)

    return Linearization(run_frozen, values, inputs, shapes, per_point_frozen)


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
