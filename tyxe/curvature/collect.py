"""The curvature of a likelihood over a data set."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tyxe.autocast import full_precision
from tyxe.curvature.accumulators import ACCUMULATORS, Accumulator
from tyxe.curvature.layer_calls import BatchDims
from tyxe.curvature.linearize import Linearization
from tyxe.data import Targets
from tyxe.distributions import ParamBlocks
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.output_hessian import (
    OutputHessians,
    output_hessian_sqrt,
    sampled_gradient,
    true_gradient,
)
from tyxe.linalg import BlockDiagonal
from tyxe.processes import all_or_none, total


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
    """

    operator: BlockDiagonal
    blocks: ParamBlocks
    log_likelihood: float | Tensor
    error: float
    num_targets: float
    key: int
    points: float = 0.0

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
        return replace(self, operator=self.operator.map(function))


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
        linearize: linearises the net on a batch.
        batches: pairs of inputs and targets, of which some may be masked or have weights.
        structure: `"full"`, the matrix; `"diag"`, its diagonal; or `"kron"`, one Kronecker product
            for each linear map: the exact block for one point without weight sharing [T 3.5], the
            product of the factors' averages for more [T 3.11, GLM A.2].
        curvature: `"ggn"`, with the output Hessian as `H_n`; `"fisher"`, with `r r^T` of one
            sampled label for each point; or `"empirical"`, with the true labels [T 3.1, GLM 2].
        reduce: for `"kron"`, sum over positions that share weights before the product; otherwise
            each position counts as a data point.
        group: the processes, each with batches of its own, over whose data the curvature is.

    Raises:
        RuntimeError: another of the processes has failed.
        ValueError: there is no batch, or no point that counts; outputs and targets do not fit the
            likelihood; batches for which the net uses its sites differently; the curvature is not
            finite.
    """
    with all_or_none(group):
        accumulator, numbers = _sums(linearize, likelihood, batches, structure, curvature, reduce)
    if group is not None:
        numbers = total(numbers.to(accumulator.like.device), group)
        for _, each in accumulator.totals():
            total(each, group)
    points, *others = numbers.tolist()
    if not points:
        raise ValueError("no point of the loader counts, so there is no curvature")
    scale = likelihood.dataset_size / points
    scaled = scale * torch.tensor(others, dtype=torch.float64, device="cpu")
    key = _key_of(accumulator, scaled)
    operator = accumulator.operator(points).scaled(scale)
    assert isinstance(operator, BlockDiagonal)
    log_likelihood, error, num_targets = scaled.tolist()
    blocks = accumulator.blocks
    return Curvature(operator, blocks, log_likelihood, error, num_targets, key, points)


def _sums(
    linearize: Callable[[Any], Linearization],
    likelihood: Likelihood,
    batches: Iterable[tuple[Any, Any]],
    structure: str,
    curvature: str,
    reduce: bool,
) -> tuple[Accumulator, Tensor]:
    """Return the sums over batches; points, log-likelihood, error and number of targets, `(4,)`."""
    options = {"reduce": reduce} if structure == "kron" else {}
    accumulator: Accumulator | None = None
    dims: list[BatchDims | None] | None = None
    numbers = torch.zeros(4, dtype=torch.float64, device="cpu")
    for inputs, given in batches:
        targets, linear = likelihood.observed(given), linearize(inputs)
        outputs = linear.outputs.detach()
        likelihood.check_batch(outputs, given)
        if accumulator is None:
            accumulator = ACCUMULATORS[structure](linear.blocks, outputs, **options)
        dims = linear.find_batch_dims(dims)
        check_blocks(accumulator.blocks, linear.blocks)
        with full_precision(outputs):
            if curvature != "ggn" or not _add_last(accumulator, linear, likelihood, targets):
                _add(accumulator, linear, likelihood, targets, curvature)
        numbers += _numbers(likelihood, outputs, targets)
    if accumulator is None:
        raise ValueError("the loader yields no batch, so there is no curvature")
    return accumulator, numbers


@torch.no_grad()
def _add_last(
    accumulator: Accumulator, linear: Linearization, likelihood: Likelihood, targets: Targets
) -> bool:
    """Add a batch's GGN without a gradient for each output, and return whether this was done."""
    whole = targets.mask is None or targets.mask.dim() == 1  # points are left out as a whole
    last = linear.last_inputs() if whole else {}
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
    counts = likelihood.output_counts(targets, outputs)
    roots = None if counts is None else counts.to(outputs).sqrt()
    once = replace(targets, weights=None, mask=None if targets.mask is None else targets.mask > 0)
    for index, column in enumerate(CURVATURES[curvature](likelihood, outputs, once)):
        column = column.detach() if roots is None else column.detach() * roots
        accumulator.add(linear.gradients(column), index == 0, targets)


@torch.no_grad()
def _numbers(likelihood: Likelihood, outputs: Tensor, targets: Targets) -> Tensor:
    """Return points, log-likelihood, error and number of targets of a batch, `(4,)`."""
    counts = targets.counts_within()
    found = (
        likelihood.count(targets),
        likelihood.log_likelihood(outputs, targets, "sum"),
        likelihood.error(outputs, targets, "sum"),
        targets.values.numel() if counts is None else counts.double().sum(),
    )
    return torch.tensor([float(number) for number in found], dtype=torch.float64, device="cpu")


def check_blocks(known: ParamBlocks, found: ParamBlocks) -> None:
    """Raise a ValueError if a net's blocks differ from those known, and so the order of weights."""
    if known != found:
        sites = [block.name for block in found if block not in known.blocks]
        raise ValueError(
            f"the net uses {', '.join(map(repr, sites))} in other ways than for another batch, so "
            "that their curvatures do not add up; hide these sites from the prior, or give the net "
            "batches for which it does the same"
        )


def _key_of(accumulator: Accumulator, numbers: Tensor) -> int:
    """Return a hash of the sums, or raise where they are not finite."""
    digest = hashlib.blake2b(digest_size=7)
    for name, tensor in accumulator.totals():
        rows = tensor.sum(-1) if tensor.dim() > 1 else tensor  # in float64 matrices take long
        total = float(rows.sum(dtype=torch.float64))
        digest.update(struct.pack("d", total))
        if not math.isfinite(total):
            raise ValueError(
                f"the curvature of {name!r} is not finite: look at the inputs and the fitted net, "
                "or use float32 where it is in half precision"
            )
    if not bool(numbers.isfinite().all()):
        raise ValueError(
            "the log-likelihood or error of these data is not finite: look for NaN and infinity in "
            "the inputs, and in weights"
        )
    digest.update(struct.pack("3d", *numbers.tolist()))
    return int.from_bytes(digest.digest(), "big")
