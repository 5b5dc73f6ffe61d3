"""The curvature of a likelihood over a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tyxe.curvature.accumulate import ACCUMULATORS, Accumulator, KroneckerAccumulator
from tyxe.curvature.layout import Layout
from tyxe.curvature.linearize import Linearization, full_precision
from tyxe.distributions import Group
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.output_hessian import output_hessian_sqrt, sampled_gradient, true_gradient
from tyxe.linalg import BlockDiagonal
from tyxe.poutine import masked_pointwise

__all__ = ["CURVATURES", "Curvature", "check_groups", "collect_curvature"]


@dataclass(frozen=True)
class Curvature:
    """The curvature at one value of the sites, for the whole data set.

    Attributes:
        operator: `sum_n J_n^T H_n J_n`, a block for each group (or one block, `"all"`).
        groups: which weights the blocks hold, in their order.
        log_likelihood: of all points at that value, nats.
        error: of all points, as the likelihood measures it.
        num_targets: elements of all targets.
    """

    operator: BlockDiagonal
    groups: list[Group]
    log_likelihood: float
    error: float
    num_targets: float


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
    check: Callable[[Tensor, Tensor], None] | None = None,
) -> Curvature:
    r"""Sum `J_n^T H_n J_n` over a data set, and scale it to the likelihood's `dataset_size`.

    `"ggn"`: the output Hessian, summed exactly over all its columns; `"fisher"`: one sampled label
    a point, `r r^T` in its place; `"empirical"`: the true labels' [T 3.1, GLM 2]. `"full"` is the
    matrix, `"diag"` its diagonal, `"kron"` one Kronecker product for each linear map: the exact
    block for one point without weight sharing [T 3.5], and the product of the factors' averages
    over several [T 3.11, GLM A.2].

    Args:
        linearize: linearises the net on a batch.
        likelihood: whose curvature.
        batches: pairs of inputs and targets.
        structure: `"full"`, `"diag"` or `"kron"`.
        curvature: `"ggn"`, `"fisher"` or `"empirical"`.
        reduce: for `"kron"`, sum over positions that share weights before the product, instead of
            taking each as a point of its own.
        check: looks at outputs and targets of a batch, and raises if they do not fit.

    Raises:
        ValueError: no batch; batches for which the net uses its sites differently, or a mask of
            points; the curvature is not finite.
    """
    accumulator: Accumulator | None = None
    points, sums = 0, torch.zeros(3, dtype=torch.float64)
    layouts: list[Layout | None] | None = None
    for inputs, targets in batches:
        linear = linearize(inputs)
        outputs = linear.outputs.detach()
        if check is not None:
            check(outputs, targets)
        if accumulator is None:
            accumulator = _accumulator(structure, linear, reduce)
        layouts = linear.find_layouts(layouts)
        check_groups(accumulator.groups, linear.groups)
        _check_unmasked(likelihood, outputs)
        with full_precision(outputs):
            for index, column in enumerate(CURVATURES[curvature](likelihood, outputs, targets)):
                accumulator.add(linear.rows(column), first=index == 0)
        points += len(targets)
        sums += _numbers(likelihood, outputs, targets)
    if accumulator is None:
        raise ValueError("the loader yields no batch, so there is no curvature")
    _check_finite(accumulator)
    scale = likelihood.dataset_size / points
    operator = accumulator.operator(points).scaled(scale)
    assert isinstance(operator, BlockDiagonal)
    return Curvature(operator, accumulator.groups, *(sums * scale).tolist())


def _numbers(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-likelihood, error and number of targets of a batch."""
    log_likelihood = likelihood.log_likelihood(outputs, targets, "sum")
    error = likelihood.error(outputs, targets, "sum")
    return torch.tensor([float(log_likelihood), float(error), targets.numel()], dtype=torch.float64)


def check_groups(known: list[Group], found: list[Group]) -> None:
    """Raise if a net uses its sites in another way than it did: their order would be another.

    Raises:
        ValueError: it does.
    """
    if known != found:
        sites = [group.name for group in found if group not in known]
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
        return KroneckerAccumulator(linear.groups, linear.outputs, reduce)
    return kind(linear.groups, linear.outputs)


def _check_finite(accumulator: Accumulator) -> None:
    for name, tensor in accumulator.sums():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"the curvature of {name!r} is not finite: look at the inputs and the fitted net, "
                "or use float32 where it is in half precision"
            )
