"""A net's outputs at one value of its sites, and their gradients for each data point."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode

from tyxe import check
from tyxe.autocast import autocast_like, is_close, rounding_of_maps
from tyxe.curvature import layer_calls
from tyxe.curvature.gradients import (
    DenseGradients,
    OuterProductGradients,
    PointGradients,
    gradients_by_name,
    looped_gradients,
    vectorized_gradients,
)
from tyxe.curvature.layer_calls import POINTS_FIRST, BatchDims, LayerCall, LayerCallRecorder
from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock, ParamBlock, SiteBlock
from tyxe.poutine.report import note
from tyxe.rng import set_torch_rng, torch_rng, torch_rng_kept
from tyxe.util import (
    Inputs,
    at_least_float32,
    kind_of_batch,
    on_error,
    outside_inference,
    outside_of_inference,
    vmapped,
)

# One backward takes so many cotangents that the gradients in maps have this many numbers, by the
# type of device; on other devices it takes one. A GPU would wait for the host in the backward of
# one. On a processor more numbers gain nothing, since they leave its cache.
MOST_AT_ONCE: dict[str, int] = {"cpu": 2**20, "cuda": 2**29}

# Runs a net on a batch at values of its sites, with no gradients in other parameters.
Forward = Callable[[Mapping[str, Tensor], Inputs], Any]


@dataclass
class Linearized:
    """What is known of a net from earlier linearisations."""

    # Whether torch.vmap takes it, so that this is not tried again in each batch.
    is_vectorized: bool = True
    # Sites that are used outside of linear maps, and take a gradient for each point.
    exact: set[str] = field(default_factory=set)
    # Kinds of batches on which gradients were compared with autograd's.
    compared: set[Any] = field(default_factory=set)
    # Whether several cotangents may have one backward, and the kinds on which it was compared.
    takes_several: bool = True
    several_compared: set[Any] = field(default_factory=set)
    # Where maps hold the points in a kind of batches, as far as one of these showed it.
    batch_dims: dict[Any, list[BatchDims | None]] = field(default_factory=dict)


class Linearization:
    """A forward on one batch, and the gradients of its outputs for each data point.

    The gradient of a point in a linear map is a sum over positions of outer products of inputs and
    pre-activation gradients, which one backward computes for all points. The points of a batch must
    not influence each other, so BatchNorm has to be in eval mode. Other sites take one gradient for
    each point, and so do those that act where no linear map is seen, such as in a derivative that
    the net returns: on the first batch of each kind the sums of the gradients are compared with
    autograd's.

    Args:
        forward: runs the net.
        values: the values of all sites, by name.
        inputs: a batch.
        shapes: the shapes of the sites whose gradients are taken.
        known: what is known of the net, which is added to.
        differentiable: whether outputs and gradients are to be differentiated again, such as in the
            inputs.
        parts: of sites that are some elements of a parameter, their indices in it and its value.

    Attributes:
        outputs: the net's outputs, `(n, ...)`, in float32 at least.

    Raises:
        TypeError: the net returns no tensor.
    """

    def __init__(
        self,
        forward: Forward,
        values: Mapping[str, Tensor],
        inputs: Inputs,
        shapes: Mapping[str, Size],
        known: Linearized | None = None,
        differentiable: bool = False,
        parts: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._differentiable = differentiable
        self._forward, self._known = forward, Linearized() if known is None else known
        self._values, self._inputs = outside_of_inference((dict(values), inputs))
        self._parts = {name: places for name, (places, _) in (parts or {}).items()}
        wholes = outside_of_inference({name: whole for name, (_, whole) in (parts or {}).items()})
        self._kind = kind_of_batch(inputs)
        is_new = self._kind not in self._known.compared
        numbers = torch_rng() if is_new else []
        with outside_inference(gradients=True), LayerCallRecorder() as recorder:
            raw = forward({**self._values, **wholes}, self._inputs)
            check_is_tensor(raw)
            self.outputs = at_least_float32(raw)
        self._node = raw.grad_fn
        self._autocast = autocast_like(raw)
        self.points = raw.shape[:1].numel()
        self._recorded, self._elsewhere, self._shapes = recorder.calls, recorder.elsewhere, shapes
        self._find_blocks()
        self._numbers = numbers if self.points else []

    def _find_blocks(self) -> None:
        elsewhere = self._elsewhere | self._known.exact
        found = layer_calls.find_blocks(self._shapes, self._recorded, elsewhere, self._parts)
        self._linear = [block for block in found if isinstance(block, LinearBlock)]
        parts = {name: SiteBlock(name, self._shapes[name]) for name in self._parts}
        self._blocks = ParamBlocks(tuple(parts.get(block.name, block) for block in found))
        self._located: dict[str, list[LayerCall]] | None = None

    @property
    def blocks(self) -> ParamBlocks:
        """The blocks of the sites."""
        # Not in the constructor, so that callers can refuse outputs of a wrong number of points.
        if self._numbers:
            numbers, self._numbers = self._numbers, []
            # A batch that is refused says nothing of others.
            with on_error(setattr, self._known, "exact", {*self._known.exact}):
                self._compare(numbers)
        return self._blocks

    @outside_inference()
    def _compare(self, numbers: Sequence[Tensor]) -> None:
        """Let sites whose gradients are not those of autograd take one for each point.

        Gradients that are not finite are not compared: they are told of later, by the site's name.
        `numbers` are the states of the generators in which the net ran.
        """
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(
            self.outputs.shape, generator=generator, device=generator.device
        ).to(self.outputs)
        expected = self._gradients_by_autograd(cotangent, numbers)
        if not all(bool(gradient.isfinite().all()) for gradient in expected.values()):
            return
        wrong, reason = self._differing(expected, cotangent)
        while wrong - self._known.exact:
            self._known.exact |= wrong
            note(
                f"Gradients in {', '.join(sorted(wrong))} are taken for each point: what "
                "layers have met does not add up to the batch's."
            )
            self._find_blocks()
            try:
                wrong, other = self._differing(expected, cotangent)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                if reason is None:
                    raise
                raise reason from error  # the net takes no batch of one point
            reason = reason or other
        if wrong and reason is not None:
            raise reason
        if wrong:
            raise RuntimeError(
                f"the gradients of {', '.join(sorted(wrong))} for each point do not add up to that "
                "of the batch: the net gives a point other outputs in another batch, or draws "
                "random numbers. Hide these parameters from the prior"
            )
        self._known.compared.add(self._kind)

    def _gradients_by_autograd(
        self, cotangent: Tensor, numbers: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradient of `cotangent . outputs`, summed over points, in each site."""
        sites = {name: self._values[name].detach().requires_grad_() for name in self._shapes}
        with torch.enable_grad(), torch_rng_kept():
            set_torch_rng(numbers)
            outputs = at_least_float32(self._forward({**self._values, **sites}, self._inputs))
        if not outputs.requires_grad:
            raise RuntimeError(
                "the net's outputs have no gradient in its parameters, as under torch.no_grad or "
                "after detach in its forward: let it record gradients, or hide what has none"
            )
        return gradients_by_name([outputs], sites, [cotangent])

    def _differing(
        self, expected: Mapping[str, Tensor], cotangent: Tensor
    ) -> tuple[set[str], layer_calls.PointsNotApart | None]:
        """Return sites with wrong gradients, summed or of a point, or those of `PointsNotApart`."""
        wrong: set[str] = set()
        # A sum does not show rows of one point that are taken for those of another. Each row has to
        # grow as the cotangent of its point does.
        scales = 2 + torch.arange(self.points, device=cotangent.device).mul(2.4).cos().to(cotangent)
        try:
            gradients = self.gradients(cotangent)
            (scaled,) = self._linear_gradients([cotangent * _along_points(scales, cotangent)])
        except layer_calls.PointsNotApart as reason:
            return reason.sites, reason
        for block in self.blocks:
            own, right = gradients[block.name], at_least_float32(block.to_vector(expected))
            tolerance = rounding_of_maps(self._values[block.sites[0]]) ** 0.4
            error = (own.sum() - right).norm()
            known = bool(error <= tolerance * right.norm().clamp(min=tolerance * cotangent.norm()))
            if block.name in scaled:
                rows, other = (_numbers_of(x) for x in (own, self._held(block.name, scaled)))
                error = (other - rows * _along_points(scales, rows)).norm()
                known = known and bool(error <= tolerance * rows.norm())
            if not known:
                wrong |= {*block.sites}
        return wrong, None

    # ------------------------------------------------------------------ where the points are

    @outside_inference()
    def find_batch_dims(
        self, known: list[BatchDims | None] | None = None
    ) -> list[BatchDims | None]:
        """Return where each map holds the points, or None where this batch does not show it.

        Only what the result for another batch, `known`, leaves open is looked for. Points that
        influence each other in a map are a ValueError.
        """
        found: list[BatchDims | None] = [None] * len(self._recorded)
        known = self._known.batch_dims.get(self._kind) if known is None else known
        if known is not None and len(known) == len(found):
            found = list(known)
        names = {site: block.name for block in self._linear for site in block.sites}
        asked = [
            index
            for index, call in enumerate(self._recorded)
            if not names.keys().isdisjoint(call.sites) and self._is_open(call, found[index])
        ]
        calls = [self._recorded[index] for index in asked]
        # Where a map may hold the points elsewhere, the other half of them is queried as well.
        first = all(call.has_points_first(self.points) for call in calls)
        asked_of = range(0 if not calls else 1 if first else 2)
        outputs = self.outputs.detach()
        queries = [layer_calls.alternating_points(outputs, n) for n in asked_of]
        gradients = [[own for (own,) in self._gradients(calls, [query])] for query, _ in queries]
        dims = [
            call.batch_dims if one in (None, POINTS_FIRST) else one
            for call, one in zip(self._recorded, found, strict=True)
        ]
        masks = [which for _, which in queries]
        answers = [list(zip(each, masks, strict=True)) for each in zip(*gradients, strict=True)]
        news = layer_calls.find_batch_dims(calls, self.points, answers)
        for index, (here, always) in zip(asked, news, strict=True):
            dims[index], found[index] = here, always
        self._located = {block.name: [] for block in self._linear}
        for call, own in zip(self._recorded, dims, strict=True):
            located = call if own == call.batch_dims else call.with_batch_dims(own)
            for name in {names[site] for site in call.sites if site in names}:
                self._located[name].append(located)
        self._known.batch_dims[self._kind] = found
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
    def _map_inputs(self) -> dict[str, layer_calls.MapInputs]:
        calls, how = self._calls, (self.points, self._differentiable)
        return {b.name: layer_calls.MapInputs(b, calls[b.name], *how) for b in self._linear}

    def result(self, tensor: Tensor) -> Tensor:
        """Return a tensor, without its graph unless that is to be differentiated again."""
        return tensor if self._differentiable else tensor.detach()

    def gradients(self, cotangent: Tensor) -> dict[str, PointGradients]:
        """Return the gradient of each point's `cotangent . outputs` in each block, by its name."""
        (found,) = self.gradients_of([cotangent])
        return found

    def gradients_of(self, cotangents: Iterable[Tensor]) -> Iterator[dict[str, PointGradients]]:
        """Yield `gradients` of each of some cotangents, by as few backwards as is fastest."""
        return itertools.chain.from_iterable(self.groups_of(cotangents))

    def groups_of(self, cotangents: Iterable[Tensor]) -> Iterator[list[dict[str, PointGradients]]]:
        """Yield what `gradients_of` does in lists, of the cotangents of each backward."""
        left = iter(cotangents)
        while some := [*itertools.islice(left, self._num_at_once())]:
            yield self._gradients_of(some)

    def _num_at_once(self) -> int:
        if not self.points or self._differentiable:
            return 1
        size = sum(call.probe.numel() for calls in self._calls.values() for call in calls)
        return max(1, MOST_AT_ONCE.get(self.outputs.device.type, 0) // max(1, size))

    @outside_inference()
    def _gradients_of(self, cotangents: Sequence[Tensor]) -> list[dict[str, PointGradients]]:
        if not self.points:  # nothing to differentiate, in any map or loop over points
            none = {block.name: self.outputs.new_zeros(0, block.size) for block in self.blocks}
            return [{n: DenseGradients(matrix) for n, matrix in none.items()} for _ in cotangents]
        gradients = []
        for linear, cotangent in zip(self._linear_gradients(cotangents), cotangents, strict=True):
            found = {name: self._held(name, linear) for name in linear}
            rest = [block for block in self.blocks if block.name not in found]
            found |= self._dense_gradients(rest, cotangent)
            gradients.append({name: found[name] for name in self.blocks.names})
        return gradients

    def _held(self, name: str, gradients: Mapping[str, Tensor]) -> PointGradients:
        """Return a block's gradients from those in its maps' outputs."""
        found = OuterProductGradients(self._map_inputs[name], gradients[name])
        if name not in self._parts:
            return found
        return DenseGradients(found.elements(self._parts[name]))

    def _linear_gradients(self, cotangents: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return, for each cotangent, the gradients in the outputs of each linear block's maps."""
        if len(cotangents) > 1 and self._known.takes_several:
            try:
                found = self._in_one_backward(cotangents)
                if self._is_as_alone(found[-1], cotangents[-1]):
                    return found
            except RuntimeError:
                pass  # such as of a node that torch.vmap does not take, or of memory
            self._known.takes_several = False
        return [one for each in cotangents for one in self._in_one_backward([each])]

    def _is_as_alone(self, found: Mapping[str, Tensor], cotangent: Tensor) -> bool:
        """Whether gradients of one of several cotangents are those of a backward of its own.

        They are compared on the first batch of each kind.
        """
        compared = self._known.several_compared
        if self._kind not in compared:
            (alone,) = self._in_one_backward([cotangent])
            if not all(is_close(found[name], alone[name]) for name in alone):
                return False
            compared.add(self._kind)
        return True

    def _in_one_backward(self, cotangents: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return what `_linear_gradients` does, by one backward of all cotangents."""
        each = self._gradients([c for calls in self._calls.values() for c in calls], cotangents)
        found: list[dict[str, Tensor]] = [{} for _ in cotangents]
        for name, calls in self._calls.items():
            parts = [
                [layer_calls.positions(one, c, self.points) for one in next(each)] for c in calls
            ]
            for own, of_calls in zip(found, zip(*parts, strict=True), strict=True):
                own[name] = layer_calls.cat_positions(of_calls)
        return found

    def _gradients(
        self, calls: list[LayerCall], cotangents: Sequence[Tensor]
    ) -> Iterator[Sequence[Tensor]]:
        """Yield, for each map, the gradients in its output, one for each cotangent."""
        at = [call.probe for call in calls if not self._is_last(call)]
        how = {"retain_graph": True, "create_graph": self._differentiable}

        def backward(weights: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(self.outputs, at, weights, materialize_grads=True, **how)

        if not at or not self.outputs.requires_grad:
            rows = [[torch.zeros_like(probe)] * len(cotangents) for probe in at]
        else:
            weights = [one.to(self.outputs) for one in cotangents]
            # Activation checkpoints run again, and must save the same tensors as in the forward.
            with LayerCallRecorder():
                if len(weights) == 1:
                    rows = [[one] for one in backward(weights[0])]
                else:
                    rows = [[*each] for each in vmapped(backward)(torch.stack(weights))]
        found = iter(rows)
        for call in calls:
            yield cotangents if self._is_last(call) else next(found)

    def _is_last(self, call: LayerCall) -> bool:
        """Whether the map's output is the net's, so that its gradient is the cotangent."""
        return call.node is not None and call.node is self._node

    def last_inputs(self) -> dict[str, Tensor]:
        """Return the inputs, `(n, columns)`, of the only block if its map's outputs are the net's.

        Its one map has one row for each point; the result is empty for all other nets.
        """
        several = len(self.blocks.names) > 1 or self._parts
        if not self.points or several or self.outputs.dim() != 2:
            return {}
        calls = [call for calls in self._calls.values() for call in calls]
        if len(calls) != 1 or not self._is_last(calls[0]):
            return {}
        first = calls[0].has_points_first(self.points)
        each = self._map_inputs.items() if first else ()
        return {name: inputs.rows[:, 0, 0] for name, inputs in each}

    def _dense_gradients(
        self, blocks: list[ParamBlock], cotangent: Tensor
    ) -> dict[str, PointGradients]:
        sites = {site: self._values[site].detach() for block in blocks for site in block.sites}
        if not sites:
            return {}
        check.memory(
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
            with plain[0], plain[1], plain[2]:
                outputs = self._forward({**self._values, **sites}, row)
            return (outputs[0] * weight).sum()

        if self._known.is_vectorized:
            try:
                return vectorized_gradients(of_point, sites, self._inputs, cotangent)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # torch.func does not take fused recurrent kernels, writes into new buffers and
                # hooks of saved tensors. The loop raises errors of the net itself again.
                pass
        found = looped_gradients(of_point, sites, self._inputs, cotangent, self._differentiable)
        self._known.is_vectorized = False
        return found


def _numbers_of(gradients: PointGradients) -> Tensor:
    return gradients.matrix if isinstance(gradients, DenseGradients) else gradients.g


def _along_points(scales: Tensor, like: Tensor) -> Tensor:
    return scales.view(-1, *[1] * (like.dim() - 1))


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
