"""The curvature of a likelihood over a data set."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tyxe.autocast import full_precision
from tyxe.curvature.accumulators import ACCUMULATORS, Accumulator, KroneckerAccumulator
from tyxe.curvature.layer_calls import BatchDims
from tyxe.curvature.linearize import Linearization
from tyxe.distributions import ParamBlocks
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.output_hessian import output_hessian_sqrt, sampled_gradient, true_gradient
from tyxe.linalg import BlockDiagonal
from tyxe.poutine.selective import masked_pointwise
from tyxe.threads import exclusive


@dataclasses.dataclass(frozen=True, eq=False)
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
    """

    operator: BlockDiagonal
    blocks: ParamBlocks
    log_likelihood: float | Tensor
    error: float
    num_targets: float
    key: int

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
        return dataclasses.replace(self, operator=self.operator.map(function))


def _ggn(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    return iter(output_hessian_sqrt(likelihood, outputs))


def _fisher(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    yield sampled_gradient(likelihood, outputs)


def _empirical(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    yield true_gradient(likelihood, outputs, targets)


CURVATURES: dict[str, Callable[[Likelihood, Tensor, Tensor], Iterator[Tensor]]] = {
    "ggn": _ggn,
    "fisher": _fisher,
    "empirical": _empirical,
}


def collect_curvature(
    linearize: Callable[[Any], Linearization],
    likelihood: Likelihood,
    batches: Iterable[tuple[Any, Tensor]],
    structure: str = "kron",
    curvature: str = "ggn",
    reduce: bool = False,
) -> Curvature:
    """Sum `J_n^T H_n J_n` over a data set, and scale it to the likelihood's `dataset_size`.

    Args:
        linearize: linearises the net on a batch.
        batches: pairs of inputs and targets.
        structure: `"full"`, the matrix; `"diag"`, its diagonal; or `"kron"`, one Kronecker product
            for each linear map: the exact block for one point without weight sharing [T 3.5], the
            product of the factors' averages for more [T 3.11, GLM A.2].
        curvature: `"ggn"`, with the output Hessian as `H_n`; `"fisher"`, with `r r^T` of one
            sampled label for each point; or `"empirical"`, with the true labels [T 3.1, GLM 2].
        reduce: for `"kron"`, sum over positions that share weights before the product; otherwise
            each position counts as a data point.

    Raises:
        ValueError: there is no batch; outputs and targets do not fit the likelihood; batches for
            which the net uses its sites differently; a mask of points; the curvature is not finite.
    """
    accumulator: Accumulator | None = None
    points, sums = 0, torch.zeros(3, dtype=torch.float64)
    batch_dims: list[BatchDims | None] | None = None
    for inputs, targets in batches:
        with exclusive():
            linear = linearize(inputs)
            outputs = linear.outputs.detach()
            likelihood.check_batch(outputs, targets)
            if accumulator is None:
                accumulator = _accumulator(structure, linear, reduce)
            batch_dims = linear.find_batch_dims(batch_dims)
            check_blocks(accumulator.blocks, linear.blocks)
            _check_unmasked(likelihood, outputs)
            with full_precision(outputs):
                for index, column in enumerate(CURVATURES[curvature](likelihood, outputs, targets)):
                    accumulator.add(linear.gradients(column.detach()), first=index == 0)
            points += len(targets)
            sums += _numbers(likelihood, outputs, targets)
    if accumulator is None:
        raise ValueError("the loader yields no batch, so there is no curvature")
    scale = likelihood.dataset_size / points
    key = _key_of(accumulator, sums * scale)
    operator = accumulator.operator(points).scaled(scale)
    assert isinstance(operator, BlockDiagonal)
    log_likelihood, error, num_targets = (sums * scale).tolist()
    return Curvature(operator, accumulator.blocks, log_likelihood, error, num_targets, key)


@torch.no_grad()
def _numbers(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return log-likelihood, error and number of targets of a batch, `(3,)`."""
    log_likelihood = likelihood.log_likelihood(outputs, targets, "sum")
    error = likelihood.error(outputs, targets, "sum")
    return torch.tensor([float(log_likelihood), float(error), targets.numel()], dtype=torch.float64)


def check_blocks(known: ParamBlocks, found: ParamBlocks) -> None:
    """Raise a ValueError if a net's blocks differ from those known, and so the order of weights."""
    if known != found:
        sites = [block.name for block in found if block not in known.blocks]
        raise ValueError(
            f"the net uses {', '.join(map(repr, sites))} in other ways than for another batch, so "
            "that their curvatures do not add up; hide these sites from the prior, or give the net "
            "batches for which it does the same"
        )


def _check_unmasked(likelihood: Likelihood, outputs: Tensor) -> None:
    rows = torch.arange(len(outputs), device=outputs.device)
    if len(masked_pointwise(likelihood.data_name, rows)) < len(outputs):
        raise ValueError(
            "selective_mask has no effect on the curvature: leave the masked points out of the "
            "loader, and let dataset_size count the others"
        )


def _accumulator(structure: str, linear: Linearization, reduce: bool) -> Accumulator:
    kind = ACCUMULATORS[structure]
    if kind is KroneckerAccumulator:
        return KroneckerAccumulator(linear.blocks, linear.outputs, reduce)
    return kind(linear.blocks, linear.outputs)


def _key_of(accumulator: Accumulator, numbers: Tensor) -> int:
    """Return a hash of the sums, or raise where they are not finite."""
    digest = hashlib.blake2b(digest_size=7)
    for name, tensor in accumulator.sums():
        total = float(tensor.sum(dtype=torch.float64))
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
