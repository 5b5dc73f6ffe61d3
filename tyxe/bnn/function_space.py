"""Predictives of a Laplace approximation in function space: Gaussian processes and refinement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.autocast import dtype_of_maps, full_precision
from tyxe.bnn.batches import collect, device_for, on_device, split_rows, take_rows
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting
from tyxe.curvature import Linearization, jacobian
from tyxe.curvature.collect import check_blocks
from tyxe.laplace import LaplaceState
from tyxe.laplace.precision import independent_terms
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.checks import check_batch
from tyxe.linalg import Operator
from tyxe.predictive import refine_laplace, refine_variational
from tyxe.predictive.gaussian import check_unbounded
from tyxe.predictive.linear_model import (
    Features,
    GPPredictive,
    LinearModel,
    hessian_root,
    output_features,
)
from tyxe.util import Inputs, tree_map_tensors

Gaussian = tuple[Tensor, Tensor]

# Number of points that are linearised at a time.
POINTS = 256


class GPOnSubset(nn.Module):
    """A random part of the data, and the Gaussian process given these points, for each posterior.

    The points move with the module, and are not in its state dict. The constructor keeps all data
    in memory. The prior's precision is multiplied by `factor * N` over the sum of the points'
    weights.
    """

    def __init__(
        self, likelihood: Likelihood, loader: Iterable[Any], num_points: int | None, factor: float
    ) -> None:
        super().__init__()
        inputs, targets = collect(loader)
        targets, rows = likelihood.counted(targets)
        inputs = inputs if rows is None else take_rows(inputs, rows)
        total = len(targets)
        num_points = total if num_points is None else num_points
        hint = ", the points that count"
        self.num_points = check.count("num_points", num_points, hint=hint, most=total)
        check.number("factor", factor, above=0)
        if self.num_points < total:
            chosen = torch.randperm(total, device="cpu")[: self.num_points]
            inputs, targets = take_rows(inputs, chosen), targets[chosen.to(targets.device)]
        self.inputs, self.targets, self.factor = inputs, targets, factor
        self.weight = float(likelihood.count(targets))
        self._of: tuple[LaplaceState, Any, GPPredictive] | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPOnSubset:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inputs = tree_map_tensors(lambda x: fn(x) if isinstance(x, Tensor) else x, self.inputs)
        return self

    def outputs(self, bnn: SupervisedBNN, state: LaplaceState, inputs: Inputs) -> Gaussian:
        """Return mean and covariance of a batch's outputs, `(n, ...)` and `(n, ..., C, C)`."""
        # Inside of autocast the net is another one.
        others = bnn.likelihood.dataset_size, dtype_of_maps(bnn._like)
        # States are immutable, so identity tells them apart.
        if self._of is None or self._of[0] is not state or self._of[1] != others:
            self._of = state, others, self._process(bnn, state)
        linear = bnn._linearize(inputs, torch.is_grad_enabled())
        outputs = linear.result(linear.outputs)
        covariance = outputs.new_zeros(0, *2 * [outputs.shape[1:].numel()])
        if linear.points:
            covariance = self._of[2].covariance(_features(linear, state))
        return outputs, _by_position(covariance.to(outputs.dtype), outputs)

    def _process(self, bnn: SupervisedBNN, state: LaplaceState) -> GPPredictive:
        _check_holds_data(state)
        device = device_for(bnn)
        inputs = on_device(self.inputs, device)
        features, roots = [], []
        pieces = [inputs] if self.num_points <= POINTS else split_rows(inputs, POINTS)
        for piece, own in zip(pieces, self.targets.split(POINTS), strict=True):
            linear = bnn._linearize(piece)
            features.append(_features(linear, state))
            roots.append(
                hessian_root(bnn.likelihood, linear.outputs.detach(), on_device(own, device))
            )
        factor = self.factor * bnn.likelihood.dataset_size / self.weight
        root = torch.cat(roots) * math.sqrt(state.weight)
        return GPPredictive(Features.cat(features), root, factor)


def _check_holds_data(state: LaplaceState) -> None:
    if state.curvature.is_empty:
        raise ValueError(
            "the prior has absorbed the data, which would count twice in function space: do this "
            "before update_prior, or after the fit of a next task"
        )


def _features(linear: Linearization, state: LaplaceState) -> Features:
    check_blocks(state.blocks, linear.blocks)
    return output_features(linear, independent_terms(state.prior)[1])


def _by_position(covariance: Tensor, outputs: Tensor) -> Tensor:
    """Return the blocks of `(n, K, K)` over the outputs' last dimension, `(n, ..., C, C)`."""
    classes = outputs.shape[-1] if outputs.dim() > 1 else 1
    positions = covariance.shape[-1] // classes
    split = covariance.view(len(outputs), positions, classes, positions, classes)
    blocks = split.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    return blocks.reshape(*(outputs.shape[:-1] or outputs.shape), classes, classes)


METHODS: dict[str, Callable[..., tuple[Tensor, Operator]]] = {
    "laplace": refine_laplace,
    "variational": refine_variational,
}


class RefinedPosterior:
    """A Gaussian `N(mean, precision^-1)` over a BNN's weights, for its net linearised at `loc`.

    The vectors are `(P,)`, in the order of the net's blocks.
    """

    def __init__(self, bnn: SupervisedBNN, loc: Tensor, mean: Tensor, precision: Operator) -> None:
        self.bnn, self.loc, self.mean, self.precision = bnn, loc, mean, precision

    def outputs(self, inputs: Inputs) -> Gaussian:
        """Return mean and covariance of a batch's outputs, `(n, ...)` and `(n, ..., C, C)`."""
        linear = self.bnn._linearize(inputs, torch.is_grad_enabled())
        now = linear.blocks.flatten(self.bnn._mean_values())
        if not torch.equal(now, self.loc.to(now)):
            raise RuntimeError(
                "the net's weights have changed since they were refined: call refine again"
            )
        outputs, rows = linear.result(linear.outputs), linear.result(jacobian(linear))
        with full_precision(rows):
            shift = rows @ (self.mean - self.loc).to(rows)
        covariance = self.precision.to(rows).inverse_quadratic(rows)
        return outputs + shift.view_as(outputs), _by_position(covariance, outputs)

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Predict, with `num_predictions`, `aggregate`, `batch_size` and `link` of the BNN."""
        return self.bnn.predict(*inputs, predictive=self.outputs, **options)

    def evaluate(self, input_data: Inputs, y: Tensor | None = None, **options: Any) -> Any:
        """Return error and log-likelihood, with the options of the BNN's `evaluate`."""
        return self.bnn.evaluate(input_data, y, predictive=self.outputs, **options)


def refined(
    bnn: SupervisedBNN,
    state: LaplaceState,
    batches: Iterable[tuple[Any, Tensor]],
    method: str,
    structure: str,
    options: dict[str, Any],
) -> RefinedPosterior:
    """Compute the posterior of `LaplaceBNN.refine`."""
    check.choice("method", method, METHODS)
    _check_holds_data(state)
    check_unbounded(bnn.likelihood)
    if state.curvature_weight != 1:
        raise ValueError(
            f"curvature_weight is {state.curvature_weight:g}: it weighs the curvature and not the "
            "fit, so that there is no one objective to refine; set bnn.options = "
            "dataclasses.replace(bnn.options, curvature_weight=1.0) for the refinement"
        )
    with fitting(bnn, train=False):
        model = linear_model(bnn, state, batches)
    with full_precision(model.loc):
        mean, precision = METHODS[method](model, structure, **options)
    return RefinedPosterior(bnn, model.loc, mean, precision)


def linear_model(
    bnn: SupervisedBNN, state: LaplaceState, batches: Iterable[tuple[Any, Tensor]]
) -> LinearModel:
    """Return a BNN's net linearised about the mode of a Laplace approximation, with all data."""
    rows, outputs, targets = [], [], []
    points = 0
    for inputs, labels in batches:
        linear = bnn._linearize(inputs)
        check_blocks(state.blocks, linear.blocks)
        check_batch(bnn.likelihood, linear.outputs.detach(), labels)
        if bnn.likelihood.has_target_hessian:
            raise TypeError("refine takes no censored targets: predict with 'glm' or 'bnn'")
        observed = bnn.likelihood.observed(labels)
        counts = observed.counts_within()
        if counts is not None:
            expected = "1 for refine: leave out weights, and points that do not count"
            check.numbers("how often a point counts", counts, expected, least=1, most=1)
        points += linear.points
        each = linear.outputs[0].numel() * linear.blocks.size
        check.memory(
            f"the Jacobians of {points:,} points",
            points * each * linear.outputs.element_size(),
            "refine with fewer weights (a prior with expose_modules=[net.last_layer]), or predict "
            "with 'glm'",
        )
        rows.append(jacobian(linear).detach())
        outputs.append(linear.outputs.detach())
        targets.append(observed.values)
    loc, mean, precision = (v.to(rows[0]) for v in (state.loc, *independent_terms(state.prior)))
    data = torch.cat(rows), torch.cat(outputs)
    weight = bnn.likelihood.dataset_size / len(data[0]) / state.temperature
    return LinearModel(*data, loc, mean, precision, bnn.likelihood, torch.cat(targets), weight)
