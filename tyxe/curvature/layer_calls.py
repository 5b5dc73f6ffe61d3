"""Calls of linear maps: the sites that they use, and the rows that belong to each data point."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro.poutine.runtime import Message
from torch import Size, Tensor

from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import Arrangement, LinearBlock, ParamBlock, SiteBlock
from tyxe.poutine import Draw, LinearMap, LinearMapMessenger
from tyxe.util import at_least_float32


class PointsNotApart(ValueError):
    """No rows of the map of some sites belong to one point each."""

    def __init__(self, message: str, sites: Iterable[str]) -> None:
        super().__init__(message)
        self.sites = {*sites}


class BatchDims(NamedTuple):
    """Where data points are in a map's rows: their dimension, or rows that are apart."""

    dim: int
    rows_are_apart: bool


# Marks calls with one row for each point, where both values of `rows_are_apart` are the same; a
# batch in which a call has other rows looks for their place anew.
POINTS_FIRST = BatchDims(-1, False)


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a linear map, with a probe for the gradient in its output."""

    event: LinearMap
    # Of the output's shape, and never read; its gradient is the pre-activation gradient.
    probe: Tensor
    # The output's node in the graph.
    node: Any

    @property
    def weight_site(self) -> str | None:
        """The site that is the weight, perhaps rearranged; None for a plain tensor or a part."""
        weight = self.event.weight
        if isinstance(weight, Draw) and self.arrangement is not None:
            return weight.name_of_site
        return _whole_site(weight)

    @property
    def arrangement(self) -> Arrangement | None:
        """How the weight has the elements of a site; None where it is the site, or a part of it."""
        weight = self.event.weight
        if isinstance(weight, Draw) and not weight.is_whole and not self.is_transposed:
            return weight.arrangement
        return None

    @property
    def bias_site(self) -> str | None:
        """The site that is the bias; None for a plain tensor or a part of a site."""
        return _whole_site(self.event.bias)

    @property
    def sites(self) -> list[str]:
        """The names of all sites that the map uses, as a whole or in part."""
        return [draw.name_of_site for draw in self.event.draws]

    @property
    def is_transposed(self) -> bool:
        """Whether the weight's first dimension counts inputs, as in transposed convolutions."""
        return self.event.kind.startswith("conv_transpose")

    @functools.cached_property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 for other maps."""
        event, channel = self.event, -1 - self.event.spatial_dims
        channels = (self.probe if self.is_transposed else event.input).shape[channel]
        return channels // event.weight.shape[1] if event.spatial_dims else 1

    @property
    def batch_dims(self) -> BatchDims:
        """The place of the points that the interception assumes, or that was found."""
        return BatchDims(self.event.batch_dim, self.event.rows_of_points_are_apart)

    def with_batch_dims(self, dims: BatchDims) -> LayerCall:
        """Return the call with another place of the points."""
        event = dataclasses.replace(
            self.event, batch_dim=dims.dim, rows_of_points_are_apart=dims.rows_are_apart
        )
        return dataclasses.replace(self, event=event)

    def has_points_first(self, points: int) -> bool:
        """Whether the output is `(n, features, *positions)` for `n = points`."""
        batched = self.event.spatial_dims + 2
        return self.probe.dim() == batched and self.probe.shape[0] == points


def _whole_site(part: Tensor | None) -> str | None:
    return part.name_of_site if isinstance(part, Draw) and part.is_whole else None


# --------------------------------------------------------------------------- recording


class _Probed(torch.autograd.Function):
    """`output + probe` for a probe of zeros, without the sum.

    The gradient in the output itself is lost where an activation changes it in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class LayerCallRecorder(LinearMapMessenger):
    """Records calls of linear maps with sites, and sites that are used in other ways."""

    name = "curvature"
    treatment = "recorded"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self.elsewhere: set[str] = set()

    def answer(self, event: LinearMap) -> Tensor | None:
        """Compute the map at the sites' values, and add the probe."""
        output = event.at_values()
        probe = output.new_empty_strided(output.shape, [0] * output.dim()).requires_grad_()
        found: Tensor = _Probed.apply(output, probe)
        self.calls.append(LayerCall(event, probe, found.grad_fn))
        return found

    def _pyro_post_draw_value(self, msg: Message) -> None:
        self.elsewhere.add(msg["args"][0].name_of_site)


def find_blocks(
    shapes: Mapping[str, Size],
    calls: Iterable[LayerCall],
    elsewhere: Iterable[str],
    parts: Collection[str] = (),
) -> ParamBlocks:
    """Return blocks of sites: weights and biases of the same linear maps, and single sites.

    `shapes` are those of all sites, in order; the sites in `elsewhere` are used by operations
    besides the `calls`, and have no factors. Those in `parts` are elements of a parameter, and
    their block is that of all of it, and of nothing else.
    """
    candidates: dict[str, set[LinearBlock]] = {}
    for call in calls:
        sites, shape = (call.weight_site, call.bias_site), call.event.weight.shape
        block = LinearBlock(*sites, shape, call.groups, call.is_transposed, call.arrangement)
        own = [block]
        if not {*parts}.isdisjoint(sites):
            bias = dataclasses.replace(block, weight=None, arrangement=None)
            own = [dataclasses.replace(block, bias=None), bias]
        for site in call.sites:
            # A site that is used in part gets no linear block: a candidate of its own excludes it.
            is_plain = site not in parts or (call.arrangement is None and not call.is_transposed)
            candidates.setdefault(site, set()).update(b for b in own if site in b.sites)
            if site not in sites or not is_plain:
                candidates[site].add(LinearBlock(f"a part of {site}", None, shapes[site]))
    other = set(elsewhere)
    blocks: dict[str, ParamBlock] = {}
    for site, shape in shapes.items():
        found = list(candidates.get(site, ()))
        chosen: ParamBlock = SiteBlock(site, shape)
        if len(found) == 1 and all(
            name not in other and candidates.get(name) == {found[0]} for name in found[0].sites
        ):
            chosen = found[0]
        blocks.setdefault(chosen.name, chosen)
    return ParamBlocks(tuple(blocks.values()))


# --------------------------------------------------------------------------- rows of a call


def positions(tensor: Tensor, call: LayerCall, points: int) -> Tensor:
    """Return a map's output, or its gradient, as `(n, R, groups, features per group)`.

    `n` is `points`, the number of data points; `R` positions of each share the weight.
    """
    groups, spatial = call.groups, call.event.spatial_dims
    if not spatial:
        return _rows(tensor, call.event, points).unflatten(-1, (groups, -1))
    channels, shape = tensor.shape[-1 - spatial], tensor.shape[-spatial:]
    sizes = groups, channels // groups, shape.numel()
    # (n, other dimensions, groups, channels per group, positions)
    split = tensor.reshape(points, -1 if points else 1, *sizes)
    return split.permute(0, 1, 4, 2, 3).flatten(1, 2)


def _rows(tensor: Tensor, event: LinearMap, points: int) -> Tensor:
    """Return the rows of a linear layer's input or output, `(n, R, features)`."""
    features = tensor.shape[-1]
    if event.rows_of_points_are_apart:
        return tensor.reshape(-1, points, features).transpose(0, 1)
    first = tensor.movedim(event.batch_dim, 0) if tensor.dim() > 1 else tensor
    return first.reshape(points, -1, features)


@dataclasses.dataclass(frozen=True)
class MapInputs:
    """What a block's columns multiply in its maps: patches for the weight, and a one for the bias.

    There are `points` data points; `keeps_graph` says whether inputs are differentiated.
    """

    block: LinearBlock
    calls: Sequence[LayerCall]
    points: int
    keeps_graph: bool = False

    @functools.cached_property
    def rows(self) -> Tensor:
        """The inputs of all positions, `(n, R, groups, columns)`."""
        with torch.set_grad_enabled(self.keeps_graph and torch.is_grad_enabled()):
            found = cat_positions(self._of_call(call) for call in self.calls)
        return found if self.keeps_graph else found.detach()

    def _of_call(self, call: LayerCall) -> Tensor:
        found = patches(call, self.points, self.block.bias is not None)
        return found[..., -1:] if self.block.weight is None else found

    def mapped(self, matrices: Tensor) -> Tensor:
        """Return what the maps are at other weights `(S, outputs, fan_in)`, `(n, S, outputs, R)`.

        The block has a weight, and no groups.
        """
        shape, block = [*self.block.weight_shape], self.block
        shape[block.is_transposed] = matrices.shape[:2].numel()
        stacked = LinearBlock("weight", None, Size(shape), 1, block.is_transposed)
        (weight,) = stacked.to_values(matrices.reshape(-1)).values()
        found = []
        for call in self.calls:
            inputs = call.event.input if self.keeps_graph else call.event.input.detach()
            outputs = call.event.function(at_least_float32(inputs), weight, None)
            found.append(positions(outputs, call, self.points))
        return cat_positions(found)[:, :, 0].mT.unflatten(1, matrices.shape[:2])

    def second_moment(self) -> Tensor:
        """Return `sum a a^T` over points and positions, `(groups, columns, columns)`."""
        if self.keeps_graph or self.block.weight is None or not all(map(_is_shifted, self.calls)):
            return second_moment(self.rows)
        how = self.block.groups, self.block.bias is not None
        with torch.no_grad():
            windows = (at_least_float32(call.event.windows()) for call in self.calls)
            return functools.reduce(torch.add, (moment_of_windows(each, *how) for each in windows))


def _is_shifted(call: LayerCall) -> bool:
    """Whether `moment_of_windows` is of a map, and takes fewer products than its patches."""
    event = call.event
    if not event.spatial_dims or call.is_transposed:
        return False
    (stride, *_), (dilation, *_) = event.steps()
    shape, positions = event.weight.shape, call.probe.shape[-event.spatial_dims]
    kernel, length = shape[2], call.probe.numel() // max(1, shape[0] * positions)
    # To write and read a product takes as long as some dozens of multiplications.
    cost = sum(positions + shift for shift in range(kernel)) * (length + 64)
    return stride == dilation and cost < 0.8 * kernel**2 * positions * length


def cat_positions(parts: Iterable[Tensor]) -> Tensor:
    """Concatenate the positions of all calls, without a copy of a single one."""
    first, *others = map(at_least_float32, parts)
    return torch.cat([first, *others], 1) if others else first


def second_moment(x: Tensor) -> Tensor:
    """Return `sum x x^T` over points and positions, `(groups, features, features)`."""
    points, positions, groups, features = x.shape
    if positions > 1 and features <= positions:
        # A product for each point needs no copy of tensors whose positions are last in memory.
        each = x.permute(2, 0, 3, 1).flatten(0, 1)
        return torch.bmm(each, each.mT).unflatten(0, (groups, points)).sum(1)
    flat = x.flatten(0, 1).transpose(0, 1)
    return torch.bmm(flat.mT, flat)


def moment_of_windows(windows: Tensor, groups: int, with_one: bool) -> Tensor:
    """Return `second_moment` of windows `(..., C, *kernel, *positions)`, without their patches.

    Row `k` of the kernel at row `i` of the positions is row `u = k + i` of the input. So products
    of rows `k` and `k'` of the kernel are sums over `u` of products of rows `u` and `u + k' - k`,
    and each of these is in several sums.
    """
    spatial = (windows.dim() - 2) // 2
    channels, *kernel = windows.shape[-1 - 2 * spatial : -spatial]
    shape, own = windows.shape[-spatial:], channels // groups
    # (points, groups, own channels, *kernel, *positions)
    split = windows.reshape(-1, groups, own, *kernel, *shape)
    last = split[:, :, :, 1:].select(3 + spatial, -1)
    parts = split.select(3, 0).movedim(2 + spatial, 0), last.movedim(3, 0)
    # (rows of the input, groups, own channels, *kernel[1:], points, *positions[1:])
    order = 0, 2, 3, *range(4, 3 + spatial), 1, *range(3 + spatial, 2 + 2 * spatial)
    rows = torch.cat([part.permute(order) for part in parts])
    rows = rows.flatten(3 + spatial - 1).flatten(2, 1 + spatial)
    other = rows.shape[2] // own
    total = rows.new_empty(groups, own, kernel[0], other, own, kernel[0], other)
    each, sizes = rows.flatten(0, 1), (-1, groups, own, other, own, other)
    for shift in range(kernel[0]):
        products = torch.bmm(each[: len(each) - shift * groups], each[shift * groups :].mT)
        # One sum for each `k`, which goes last.
        sums = products.unflatten(0, (-1, groups)).unfold(0, shape[0], 1).sum(-1)
        total.diagonal(shift, 2, 5).copy_(sums.view(sizes).movedim(0, -1))
        total.diagonal(-shift, 2, 5).copy_(sums.mT.reshape(sizes).movedim(0, -1))
    found = total.flatten(4).flatten(1, 3)
    if not with_one:
        return found
    by_row = rows.sum(-1).unfold(0, shape[0], 1).sum(-1).unflatten(-1, (own, other))
    ones = by_row.permute(1, 2, 0, 3).flatten(1).unsqueeze(-1)
    count = ones.new_full((groups, 1, 1), split.shape[0] * shape.numel())
    return torch.cat([torch.cat([found, ones], 2), torch.cat([ones.mT, count], 2)], 1)


def patches(call: LayerCall, points: int, with_one: bool = False) -> Tensor:
    """Return what the weight multiplies at each position, `(n, R, groups, fan_in [+ 1])`.

    `with_one` appends the one that the bias multiplies. A transposed convolution picks its patches
    itself, with the identity as weight, which is correct for all strides, paddings and dilations.
    """
    event = call.event
    if event.spatial_dims and not call.is_transposed:
        return _patches_of(event.windows(), points, call.groups, with_one)
    dims = event.spatial_dims
    found = _picked(call, points) if dims else _rows(event.input, event, points).unsqueeze(2)
    return torch.cat([found, found.new_ones(*found.shape[:-1], 1)], -1) if with_one else found


def _picked(call: LayerCall, points: int) -> Tensor:
    event, groups, shape = call.event, call.groups, call.event.weight.shape
    inputs = shape[0] // groups
    fan = inputs * shape[2:].numel()
    pick = torch.eye(fan, dtype=event.input.dtype, device=event.input.device)
    pick = pick.view(fan, inputs, *shape[2:]).transpose(0, 1)
    pick = pick.repeat(groups, *[1] * (pick.dim() - 1))
    return positions(event.function(event.input, pick, None), call, points)


def _patches_of(windows: Tensor, points: int, groups: int, with_one: bool) -> Tensor:
    """Return windows `(..., C, *kernel, *positions)` as `(n, R, groups, fan_in [+ 1])`.

    This takes one copy, with positions last in memory, as in the gradients they are multiplied by.
    """
    spatial = (windows.dim() - 2) // 2
    channels, *kernel = windows.shape[-1 - 2 * spatial : -spatial]
    shape = windows.shape[-spatial:]
    split = windows.reshape(points, -1, groups, channels // groups, *kernel, *shape)
    fan = split.shape[3 : 4 + spatial].numel()
    found = windows.new_empty(*split.shape[:3], fan + with_one, *shape)
    found.narrow(3, 0, fan).view_as(split).copy_(split)
    if with_one:
        found.select(3, fan).fill_(1.0)
    return found.flatten(4).permute(0, 1, 4, 2, 3).flatten(1, 2)


# --------------------------------------------------------------------------- batch dimensions


def alternating_points(outputs: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return a cotangent of the outputs of every second point from `first`, and a mask of these.

    Neighbours are not among them together, so that rows mistaken for a neighbour's are noticed.
    """
    asked = torch.arange(len(outputs), device=outputs.device) % 2 == first
    # Equal weights would cancel in outputs that sum to one.
    weights = torch.arange(outputs[0].numel(), device=outputs.device).cos().to(outputs)
    cotangent = outputs.new_zeros(outputs.shape)
    cotangent[asked] = weights.view(outputs[0].shape)
    return cotangent, asked


def find_batch_dims(
    calls: Sequence[LayerCall], points: int, answers: Sequence[Sequence[tuple[Tensor, Tensor]]]
) -> list[tuple[BatchDims, BatchDims | None]]:
    """Find batch dimensions for which the gradients of some points are in the rows of these alone.

    `answers` are gradients in each map's output, each with a mask, `(n,)`, of the points whose
    outputs were differentiated. The second result holds for other batches as well; it is None where
    the gradients are zero or several dimensions fit. `PointsNotApart` says that none fit.
    """
    candidates = [[*_candidates(call, points)] for call in calls]
    facts = [
        fact
        for call, own, known in zip(calls, answers, candidates, strict=True)
        for fact in _facts(call, points, own, known)
    ]
    # One read for all maps: each makes the host wait for a GPU.
    numbers = iter(torch.stack(facts).cpu().tolist() if facts else [])
    found: list[tuple[BatchDims, BatchDims | None]] = []
    for call, known in zip(calls, candidates, strict=True):
        is_finite, is_any, *stay = itertools.islice(numbers, 2 + len(known))
        fitting = [dims for dims, stays in zip(known, stay, strict=True) if stays]
        if not is_finite:  # `collect_curvature` raises for gradients that are not finite
            found.append((call.batch_dims, None))
        elif not fitting:
            raise _not_apart(call, points)
        elif len(fitting) > 1 or not is_any:
            found.append((fitting[0], None))
        else:
            is_first = call.has_points_first(points)
            found.append((fitting[0], POINTS_FIRST if is_first else fitting[0]))
    return found


def _facts(
    call: LayerCall,
    points: int,
    answers: Sequence[tuple[Tensor, Tensor]],
    candidates: Sequence[BatchDims],
) -> Iterator[Tensor]:
    """Yield whether gradients are finite, are not all zero, and stay apart by each candidate."""
    gradients = [gradient for gradient, _ in answers]
    yield torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
    yield torch.stack([gradient.any() for gradient in gradients]).any()
    for dims in candidates:
        located = call.with_batch_dims(dims)
        yield torch.stack([_stays(located, points, *answer) for answer in answers]).all()


def _not_apart(call: LayerCall, points: int) -> PointsNotApart:
    return PointsNotApart(
        f"in the map of {call.sites[0]!r}, whose output has shape {tuple(call.probe.shape)} "
        f"for {points} data points, the gradient of some points' outputs reaches rows of "
        "others: points influence each other there, as nodes of a graph do, or the rows are "
        "not in the order of the points, or are the same for all. Give batches of one point "
        "with all that it depends on, or an order in which points come first, or hide the "
        "parameter from the prior",
        call.sites,
    )


def _candidates(call: LayerCall, points: int) -> Iterator[BatchDims]:
    shape = call.probe.shape[: call.probe.dim() - call.event.spatial_dims - 1]
    if shape.numel() % points or not shape:
        return
    yield call.batch_dims
    if call.event.spatial_dims or call.has_points_first(points):
        return
    others = [BatchDims(dim, False) for dim, size in enumerate(shape) if size == points]
    others += [BatchDims(0, True)] if len(shape) == 1 else []
    yield from (dims for dims in others if dims != call.batch_dims)


def _stays(call: LayerCall, points: int, gradient: Tensor, asked: Tensor) -> Tensor:
    reached = positions(gradient, call, points).flatten(1).any(1)
    return ~(reached & ~asked).any()
