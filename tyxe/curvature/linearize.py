"""A net's outputs at one value of its sites, and their gradients for each data point."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Size, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from tyxe.autocast import autocast_like
from tyxe.curvature.layer_calls import (
    POINTS_FIRST,
    BatchDims,
    LayerCall,
    LayerCallRecorder,
    alternating_points,
    find_batch_dims,
    find_blocks,
    inputs_of,
    positions,
)
from tyxe.curvature.memory import check_memory
from tyxe.curvature.per_point import Substituted, looped_gradients, vectorized_gradients
from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock, ParamBlock
from tyxe.util import Inputs, at_least_float32, call_with

# Nets that torch.vmap does not take, so that it is not tried again for each column and batch.
_NOT_VECTORIZED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class OuterProductGradients:
    """Gradients of one cotangent in a linear block: `sum_r g_nr a_nr^T` for each point.

    Attributes:
        a: the map's inputs, `(n, R, groups, columns)`, with a one for the bias.
        g: the gradients in the map's outputs, `(n, R, groups, outputs)`.
    """

    a: Tensor
    g: Tensor

    def dense(self) -> Tensor:
        """Return the gradients, `(n, P)`."""
        return torch.einsum("nrgo,nrgi->ngoi", self.g, self.a).flatten(1)


@dataclass(frozen=True)
class DenseGradients:
    """Gradients of one cotangent in a block without factors, `(n, P)`."""

    matrix: Tensor

    def dense(self) -> Tensor:
        """Return the gradients, `(n, P)`."""
        return self.matrix


PointGradients = OuterProductGradients | DenseGradients


class Linearization:
    """A forward on one batch, and the gradients of its outputs for each data point.

    The gradient of a point in a linear map is a sum over positions of outer products of inputs and
    pre-activation gradients, which one backward computes for all points. The points of a batch must
    not influence each other, so BatchNorm has to be in eval mode. Other sites take one gradient for
    each point.

    Args:
        net: a net, whose parameters are not changed.
        substituted: puts values in the sites' places, in the forward and in backwards that run
            parts of it again, as activation checkpoints do.
        values: the values of all sites, by name.
        inputs: a batch.
        shapes: the shapes of the sites whose gradients are taken.

    Attributes:
        outputs: the net's outputs, `(n, ...)`, in float32 at least.
        blocks: the blocks of the sites.

    Raises:
        TypeError: the net returns no tensor.
    """

    def __init__(
        self,
        net: nn.Module,
        substituted: Substituted,
        values: Mapping[str, Tensor],
        inputs: Inputs,
        shapes: Mapping[str, Size],
    ) -> None:
        self._net, self._substituted = net, substituted
        self._values, self._inputs = values, inputs
        with torch.enable_grad(), LayerCallRecorder() as recorder, self._frozen_at(values):
            raw = call_with(net, inputs)
            check_is_tensor(raw)
            self.outputs = at_least_float32(raw)
        self._node = raw.grad_fn
        self._autocast = autocast_like(raw)
        self.points = raw.shape[:1].numel()
        self.blocks = find_blocks(shapes, recorder.calls, recorder.elsewhere)
        self._recorded = recorder.calls
        self._located: dict[str, list[LayerCall]] | None = None

    @contextmanager
    def _frozen_at(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        with _frozen(self._net), self._substituted(values):
            yield

    # ------------------------------------------------------------------ where the points are

    def find_batch_dims(
        self, known: list[BatchDims | None] | None = None
    ) -> list[BatchDims | None]:
        """Return where each map holds the points, or None where this batch does not show it.

        Args:
            known: the result for another batch; only what it leaves open is looked for.

        Raises:
            ValueError: the points influence each other in a map.
        """
        count = len(self._recorded)
        found: list[BatchDims | None] = [None] * count
        if known is not None and len(known) == count:
            found = list(known)
        asked = [
            index for index, call in enumerate(self._recorded) if self._is_open(call, found[index])
        ]
        calls = [self._recorded[index] for index in asked]
        # Where a map may hold the points elsewhere, the other half of them is queried as well.
        first = all(call.has_points_first(self.points) for call in calls)
        asked_of = range(0 if not calls else 1 if first else 2)
        queries = [alternating_points(self.outputs.detach(), n) for n in asked_of]
        gradients = [list(self._gradients(calls, query)) for query, _ in queries]
        dims = [
            call.batch_dims if one in (None, POINTS_FIRST) else one
            for call, one in zip(self._recorded, found, strict=True)
        ]
        for index, call, *each in zip(asked, calls, *gradients, strict=True):
            answers = [(g, which) for g, (_, which) in zip(each, queries, strict=True)]
            dims[index], found[index] = find_batch_dims(call, self.points, answers)
        located = [call.with_batch_dims(d) for call, d in zip(self._recorded, dims, strict=True)]
        self._located = _by_block(self.blocks, located)
        return found

    def _is_open(self, call: LayerCall, known: BatchDims | None) -> bool:
        if self.points < 2 or self._is_last(call):
            return False
        return known is None or (known == POINTS_FIRST and not call.has_points_first(self.points))

    @property
    def _calls(self) -> dict[str, list[LayerCall]]:
        if self._located is None:
            self.find_batch_dims()
        assert self._located is not None
        return self._located

    # ------------------------------------------------------------------ gradients

    @functools.cached_property
    def _a(self) -> dict[str, Tensor]:
        # Not in the constructor, so that callers can refuse outputs of a wrong number of points.
        linear = [block for block in self.blocks if isinstance(block, LinearBlock)]
        return {block.name: self._inputs_of(block) for block in linear}

    def _inputs_of(self, block: LinearBlock) -> Tensor:
        calls = self._calls[block.name]
        parts = [at_least_float32(inputs_of(block, call, self.points)) for call in calls]
        return _cat(parts).detach()

    def gradients(self, cotangent: Tensor) -> dict[str, PointGradients]:
        """Return the gradient of each point's `cotangent . outputs` in each block, by its name.

        Args:
            cotangent: a cotangent of the outputs' shape, `(n, ...)`.

        Raises:
            ValueError: the gradients of sites without factors take too much memory.
        """
        if not self.points:  # nothing to differentiate, in any map or loop over points
            none = {block.name: self.outputs.new_zeros(0, block.size) for block in self.blocks}
            return {name: DenseGradients(matrix) for name, matrix in none.items()}
        calls = [call for calls in self._calls.values() for call in calls]
        each = self._gradients(calls, cotangent)
        found: dict[str, PointGradients] = {}
        for block in self.blocks:
            if isinstance(block, LinearBlock):
                parts = [
                    positions(at_least_float32(next(each)), call, self.points)
                    for call in self._calls[block.name]
                ]
                found[block.name] = OuterProductGradients(self._a[block.name], _cat(parts))
        rest = [block for block in self.blocks if block.name not in found]
        found.update(self._dense_gradients(rest, cotangent))
        return {name: found[name] for name in self.blocks.names}

    def _gradients(self, calls: list[LayerCall], cotangent: Tensor) -> Iterator[Tensor]:
        """Yield the gradient in the output of each map."""
        at = [call.probe for call in calls if not self._is_last(call)]
        grads: tuple[Tensor | None, ...] = (None,) * len(at)
        if at and self.outputs.requires_grad:
            # Activation checkpoints run again, and must save the same tensors as in the forward.
            with LayerCallRecorder(), self._frozen_at(self._values):
                grads = torch.autograd.grad(
                    self.outputs,
                    at,
                    cotangent.to(self.outputs.dtype),
                    retain_graph=True,
                    allow_unused=True,
                )
        found = iter(grads)
        for call in calls:
            grad = cotangent if self._is_last(call) else next(found)
            yield torch.zeros_like(call.probe) if grad is None else grad

    def _is_last(self, call: LayerCall) -> bool:
        """Say whether the map's output is the net's, so that its gradient is the cotangent."""
        return call.node is not None and call.node is self._node

    def last_inputs(self) -> dict[str, Tensor]:
        """Return the inputs, `(n, columns)`, of the only block if its map's outputs are the net's.

        Its one map has one row for each point; the result is empty for all other nets.
        """
        may_be = self.points and len(self.blocks.names) == 1 and self.outputs.dim() == 2
        calls = [call for calls in self._calls.values() for call in calls] if may_be else []
        is_alone = len(calls) == 1
        call = calls[0] if is_alone else None
        if call is None or not self._is_last(call) or not call.has_points_first(self.points):
            return {}
        return {name: a[:, 0, 0] for name, a in self._a.items()}

    def _dense_gradients(
        self, blocks: list[ParamBlock], cotangent: Tensor
    ) -> dict[str, PointGradients]:
        sites = {site: self._values[site].detach() for block in blocks for site in block.sites}
        if not sites:
            return {}
        check_memory(
            f"the gradients of {self.points} points in {', '.join(sites)}",
            self.points * sum(at_least_float32(site).nbytes for site in sites.values()),
            "take smaller batches, or hide these sites from the prior",
        )
        each = self._per_point(sites, cotangent)
        found = {s: at_least_float32(g).reshape(self.points, -1) for s, g in each.items()}
        return {b.name: DenseGradients(torch.cat([found[s] for s in b.sites], 1)) for b in blocks}

    def _per_point(self, sites: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
        """Return the gradients of each point by itself, `(n, *shape)` by site."""

        def of_point(sites: Mapping[str, Tensor], row: Inputs, weight: Tensor) -> Tensor:
            # torch.vmap does not take fused attention kernels. Any active mode turns off the one of
            # PyTorch's transformer.
            plain = BaseTorchFunctionMode(), sdpa_kernel(SDPBackend.MATH), self._autocast()
            with plain[0], plain[1], plain[2], self._substituted({**self._values, **sites}):
                outputs = call_with(self._net, row)
            return (outputs[0] * weight).sum()

        net = self._net
        # Here, because parameters cannot be frozen inside of torch.vmap.
        with _frozen(net):
            if net not in _NOT_VECTORIZED:
                try:
                    return vectorized_gradients(of_point, sites, self._inputs, cotangent)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # torch.func does not take fused recurrent kernels, writes into new buffers and
                    # hooks of saved tensors. The loop raises errors of the net itself again.
                    pass
            found = looped_gradients(
                of_point,
                sites,
                self._inputs,
                cotangent,
                lambda at: self._substituted({**self._values, **at}),
            )
            _NOT_VECTORIZED.add(net)
            return found


@contextmanager
def _frozen(net: nn.Module) -> Iterator[None]:
    """Freeze all parameters, so that the graph starts at the first site."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def _cat(parts: list[Tensor]) -> Tensor:
    """Concatenate the positions of all calls, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _by_block(blocks: ParamBlocks, calls: list[LayerCall]) -> dict[str, list[LayerCall]]:
    linear = [block for block in blocks if isinstance(block, LinearBlock)]
    owner = {site: block.name for block in linear for site in block.sites}
    found: dict[str, list[LayerCall]] = {block.name: [] for block in linear}
    for call in calls:
        for name in {owner[site] for site in call.sites if site in owner}:
            found[name].append(call)
    return found


def check_is_tensor(outputs: Any) -> None:
    """Raise a TypeError unless a net's output is a tensor of real numbers."""
    if isinstance(outputs, Tensor) and not outputs.is_floating_point():
        raise TypeError(
            f"the net returns {outputs.dtype}; the likelihood needs real numbers that depend "
            "smoothly on the weights, such as logits in place of classes"
        )
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"the net returns a {type(outputs).__name__}; the likelihood needs a tensor: name the "
            "one to be observed by output=, a name, an index or a function, take "
            "tyxe.likelihoods.Joint for several, or PytorchBNN with a loss of your own"
        )
