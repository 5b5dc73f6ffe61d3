"""The curvature of a likelihood over a data set."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.curvature.accumulators import ACCUMULATORS, Accumulator
from tyxe.curvature.layer_calls import BatchDims
from tyxe.curvature.linearize import Linearization
from tyxe.data import Targets
from tyxe.distributions import ParamBlocks
from tyxe.likelihoods import HomoskedasticGaussian, Likelihood
from tyxe.likelihoods.checks import check_batch
from tyxe.likelihoods.output_hessian import (
    OutputHessians,
    output_hessian,
    output_hessian_sqrt,
    sampled_gradient,
    true_gradient,
)
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker, Operator
from tyxe.processes import all_or_none, total


@dataclass(frozen=True, eq=False)
class ByNoise:
    """What a curvature has of the outputs of each noise, where a Gaussian has several.

    They are in the order of the likelihood's `scale.flatten()`.

    Attributes:
        parts: those of the operator, by the names of its blocks, see `Accumulator.parts`.
        errors: sums of squared residuals.
        num_targets: numbers of elements of targets.
    """

    parts: dict[str, Tensor]
    errors: tuple[float, ...]
    num_targets: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Curvature:
    """The curvature at one value of the sites, scaled to the whole data set.

    Attributes:
        operator: `sum_n J_n^T H_n J_n`, with a block for each of `blocks`, or one, `"all"`.
        blocks: the sites and weights that the rows belong to.
        log_likelihood: log-likelihood of all points at that value, in nats; a tensor where it is
            differentiable in a noise.
        error: the likelihood's error, summed over all points.
        num_targets: number of elements of all targets.
        key: identifies this curvature in posteriors that hold it, as their `absorbed`.
        points: number of points that were summed, before the sum was scaled; 0 if not known.
        by_noise: the same of each noise, where there are several and they fit into memory.
    """

    operator: BlockDiagonal
    blocks: ParamBlocks
    log_likelihood: float | Tensor
    error: float
    num_targets: float
    key: int
    points: float = 0.0
    by_noise: ByNoise | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it is the curvature of no data, such as one that a prior has absorbed."""
        return not self.num_targets

    def emptied(self) -> Curvature:
        """Return a curvature of no data, as it is left when a prior has absorbed this one."""
        operator = self.operator.scaled(0.0)
        return Curvature(operator, self.blocks, 0.0, 0.0, 0.0, ~self.key)

    def map(self, function: Callable[[Tensor], Tensor]) -> Curvature:
        """Return the curvature with a function of each of its operator's tensors."""
        found = replace(self, operator=self.operator.map(function))
        if self.by_noise is None:
            return found
        parts = {name: function(part) for name, part in self.by_noise.parts.items()}
        return replace(found, by_noise=replace(self.by_noise, parts=parts))

    def at_noise(self, factors: Tensor) -> BlockDiagonal:
        """Return `sum_d c_d G_d`, `c` being a factor of each noise, `(noises,)`, or of one for all.

        It is differentiable in the factors, once.
        """
        if self.by_noise is None:
            found = _scaled(self.operator, factors[0])
        else:
            parts = self.by_noise.parts.items()
            totals = {name: torch.tensordot(factors, part, 1) for name, part in parts}
            blocks = self.operator.blocks.items()
            found = BlockDiagonal({name: _of_numbers(each, totals[name]) for name, each in blocks})
        assert isinstance(found, BlockDiagonal)
        return found


def _scaled(operator: Operator, factor: Tensor) -> Operator:
    """Return a curvature times a factor, of products their output factor, as of other gradients."""
    if isinstance(operator, BlockDiagonal):
        return BlockDiagonal({n: _scaled(part, factor) for n, part in operator.blocks.items()})
    if isinstance(operator, Kronecker):
        return replace(operator, out_eigenvalues=factor * operator.out_eigenvalues)
    return operator.scaled(factor)


def _of_numbers(like: Operator, numbers: Tensor) -> Operator:
    """Return a block of the structure of another, of one of `Accumulator.parts`."""
    if isinstance(like, BlockDiagonal):  # the groups of a convolution
        pairs = zip(like.blocks.items(), numbers, strict=True)
        return BlockDiagonal({name: _of_numbers(block, each) for (name, block), each in pairs})
    if isinstance(like, Kronecker):
        return like.with_out_factor(numbers.view_as(like.out_basis))
    return Dense(numbers) if isinstance(like, Dense) else Diagonal(numbers)


# From a likelihood, outputs and targets to the cotangents whose gradients are squared.
CURVATURES: dict[str, Callable[[Likelihood, Tensor, Any], Iterable[Tensor]]] = {
    "ggn": lambda likelihood, outputs, targets: output_hessian_sqrt(likelihood, outputs),
    "fisher": lambda likelihood, outputs, targets: [sampled_gradient(likelihood, outputs)],
    "empirical": lambda *data: [true_gradient(*data)],
}


def collect_curvature(
    linearize: Callable[[Any], Linearization],
    likelihood: Likelihood,
    batches: Iterable[tuple[Any, Any]],
    structure: str = "kron",
    curvature: str = "ggn",
    reduce: bool = False,
    group: Any = None,
) -> Curvature:
    """Sum `J_n^T H_n J_n` over a data set, and scale it to the likelihood's `dataset_size`.

    Args:
        linearize: a function that linearises the net on a batch.
        batches: pairs of inputs and targets, of which some may be masked or have weights.
        structure: `"full"`, the matrix; `"diag"`, its diagonal; or `"kron"`, one Kronecker product
            for each linear map: the exact block for one point without weight sharing [T 3.5], the
            product of the factors' averages for more [T 3.11, GLM A.2].
        curvature: `"ggn"`, with the output Hessian as `H_n`; `"fisher"`, with `r r^T` of one
            sampled label for each point; or `"empirical"`, with the true labels [T 3.1, GLM 2].
        reduce: for `"kron"`, sum over positions that share weights before the product; otherwise
            each position counts as a data point.
        group: the processes, each with its own batches; the curvature is that of all data.

    Raises:
        RuntimeError: another of the processes has failed.
        ValueError: there is no point that counts; outputs and targets do not fit the likelihood;
            batches for which the net uses its sites differently; the curvature is not finite.
    """
    with all_or_none(group):
        accumulator, numbers = _sums(linearize, likelihood, batches, structure, curvature, reduce)
    if group is not None:
        numbers = total(numbers.to(accumulator.like.device), group)
        for _, each in accumulator.totals():
            total(each, group)
    points, *others = numbers.tolist()
    scale = likelihood.dataset_size / check.points(points)
    scaled = scale * torch.tensor(others, dtype=torch.float64, device="cpu")
    key = key_of(accumulator.totals(), scaled)
    operator = accumulator.operator(points).scaled(scale)
    assert isinstance(operator, BlockDiagonal)
    log_likelihood, error, num_targets, *apart = scaled.tolist()
    found = Curvature(operator, accumulator.blocks, log_likelihood, error, num_targets, key, points)
    if accumulator.noises == 1:
        return found
    by_noise = ByNoise(accumulator.parts(points, scale), tuple(apart[::2]), tuple(apart[1::2]))
    return replace(found, by_noise=by_noise)


def _sums(
    linearize: Callable[[Any], Linearization],
    likelihood: Likelihood,
    batches: Iterable[tuple[Any, Any]],
    structure: str,
    curvature: str,
    reduce: bool,
) -> tuple[Accumulator, Tensor]:
    """Return the sums over batches, of the curvature and of `numbers_of`."""
    options: dict[str, Any] = {"reduce": reduce} if structure == "kron" else {}
    accumulator: Accumulator | None = None
    dims: list[BatchDims | None] | None = None
    numbers: list[list[Any]] = []
    for inputs, given in batches:
        targets, linear = likelihood.observed(given), linearize(inputs)
        outputs = linear.outputs.detach()
        check_batch(likelihood, outputs, given)
        if accumulator is None:
            kind = ACCUMULATORS[structure]
            if curvature == "ggn":  # gradients of labels couple the outputs
                size = kind.size_of_noise(linear.blocks)
                options["noises"] = _num_noises(likelihood, outputs, size)
            accumulator = kind(linear.blocks, outputs, **options)
        dims = linear.find_batch_dims(dims)
        check_blocks(accumulator.blocks, linear.blocks)
        with full_precision(outputs):
            is_plain = curvature == "ggn" and accumulator.noises == 1
            if not (is_plain and _add_last(accumulator, linear, likelihood, targets)):
                _add(accumulator, linear, likelihood, targets, curvature)
        numbers.append(numbers_of(likelihood, outputs, targets, accumulator.noises))
    known = check.known(accumulator, "the loader yields no batch, so there is no curvature")
    # Not in the loop, where a GPU would wait for the host.
    return known, torch.stack([*map(read_numbers, numbers)]).sum(0)


def _num_noises(likelihood: Likelihood, outputs: Tensor, size: int) -> int:
    """Return the number of a Gaussian's noises, or 1 where as many sums of a size do not fit."""
    plain = output_hessian.dispatch(HomoskedasticGaussian)
    has_own = output_hessian.dispatch(type(likelihood)) is not plain
    if has_own or not isinstance(likelihood, HomoskedasticGaussian):
        return 1
    scale = likelihood.scale_of(like=outputs)
    needed = (1 + scale.numel()) * size * scale.element_size()
    return scale.numel() if scale.dim() < outputs.dim() and needed <= check.MEMORY_LIMIT else 1


def _noises_of(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return which of several noises each of a point's outputs has, of their shape."""
    assert isinstance(likelihood, HomoskedasticGaussian)
    shape = likelihood.scale_of(like=outputs).shape
    return torch.arange(shape.numel(), device=outputs.device).view(shape).expand(outputs.shape[1:])


@torch.no_grad()
def _add_last(
    accumulator: Accumulator, linear: Linearization, likelihood: Likelihood, targets: Targets
) -> bool:
    """Add a batch's GGN without a gradient for each output, and return whether this was done."""
    is_plain = targets.has_whole_points and not likelihood.has_target_hessian
    last = linear.last_inputs() if is_plain else {}
    hessians = OutputHessians(likelihood, linear.outputs.detach(), targets.counts())
    return any(accumulator.add_last(name, a, hessians) for name, a in last.items())


def _add(
    accumulator: Accumulator,
    linear: Linearization,
    likelihood: Likelihood,
    targets: Targets,
    curvature: str,
) -> None:
    outputs = linear.outputs.detach()
    roots, once = counts_apart(likelihood, outputs, targets, curvature)
    several = accumulator.noises > 1  # and then each output has a column of its own
    noises = _noises_of(likelihood, outputs).flatten().tolist() if several else itertools.repeat(0)
    columns = (
        column.detach() if roots is None else column.detach() * roots
        for column in CURVATURES[curvature](likelihood, outputs, once)
    )
    one_by_one = ([each] for each in linear.gradients_of(columns))
    groups = one_by_one if several else linear.groups_of(columns)
    for noise, (index, each) in zip(noises, enumerate(groups), strict=False):
        accumulator.add(each, index == 0, targets, noise)


def counts_apart(
    likelihood: Likelihood, outputs: Tensor, targets: Targets, curvature: str
) -> tuple[Tensor | None, Targets]:
    """Return roots of how often outputs count, None for once, and targets that all count once."""
    is_true = curvature == "empirical"  # gradients, which have all of the targets
    counted = likelihood.output_counts if is_true else likelihood.hessian_counts
    counts = counted(targets, outputs)
    once = replace(targets, weights=None, mask=None if targets.mask is None else targets.mask > 0)
    return None if counts is None else counts.to(outputs).sqrt(), once


@torch.no_grad()
def numbers_of(likelihood: Likelihood, outputs: Tensor, targets: Targets, noises: int) -> list[Any]:
    """Return points, log-likelihood, error and number of targets of a batch, unread.

    Of several noises, error and number of targets follow for each.
    """
    found = [likelihood.count(targets), likelihood.log_likelihood(outputs, targets, "sum")]
    parts = [targets]
    if noises > 1:
        own = _noises_of(likelihood, outputs).expand(outputs.shape)
        parts += [targets.masked(own == noise) for noise in range(noises)]
    for part in parts:
        counts = part.counts_within()
        found.append(likelihood.error(outputs, part, "sum"))
        found.append(part.values.numel() if counts is None else counts.double().sum())
    return found


def read_numbers(numbers: list[Any]) -> Tensor:
    """Return numbers as a tensor on the processor, for which the host waits."""
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64, device="cpu")


def check_blocks(known: ParamBlocks, found: ParamBlocks) -> None:
    """Raise a ValueError if a net's blocks differ from those known, and so the order of weights."""
    if known != found:
        sites = [block.name for block in found if block not in known.blocks]
        raise ValueError(
            f"the net uses {', '.join(map(repr, sites))} in other ways than for another batch, so "
            "that their curvatures do not add up; hide these sites from the prior, or give the net "
            "batches for which it does the same"
        )


def key_of(totals: Iterable[tuple[str, Tensor]], numbers: Tensor) -> int:
    """Return a hash of the sums, or raise where they are not finite."""
    digest = hashlib.blake2b(digest_size=7)
    names, tensors = zip(*totals, strict=True)
    rows = (each.sum(-1) if each.dim() > 1 else each for each in tensors)  # matrices take long
    # One read for all: each makes the host wait for a GPU.
    sums = torch.stack([each.sum(dtype=torch.float64) for each in rows]).tolist()
    for name, number in zip(names, sums, strict=True):
        digest.update(struct.pack("d", number))
        look = "look at the inputs and the fitted net, or use float32 where it is in half precision"
        check.number(f"the curvature of {name!r}", number, hint=f": {look}")
    expected = "finite numbers: look for NaN and infinity in the inputs, and in weights"
    check.numbers("the log-likelihood or error of these data", numbers, expected)
    digest.update(struct.pack(f"{len(numbers)}d", *numbers.tolist()))
    return int.from_bytes(digest.digest(), "big")
