"""Predictives of a Laplace approximation that go back to the data: `gp`, and refined posteriors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tyxe.bnn.base import modes_restored
from tyxe.bnn.batches import batches_of, collect, split_rows, take_rows
from tyxe.bnn.linearized import linearize
from tyxe.curvature import check_groups, check_memory, jacobian, joined
from tyxe.linalg import Operator
from tyxe.predictive import (
    Features,
    GPPredictive,
    LinearModel,
    hessian_root,
    output_features,
    refine_laplace,
    refine_variational,
)
from tyxe.util import tree_map_tensors

__all__ = ["METHODS", "GPOnSubset", "RefinedPosterior", "gp_outputs", "refined"]

Gaussian = tuple[Tensor, Tensor]

# Points that are linearised at a time.
POINTS = 256


# --------------------------------------------------------------------------- gp


class GPOnSubset:
    """Some of the data, and the Gaussian process given them, anew for each posterior.

    Args:
        loader: yields `(inputs, targets)`; all of them are held for a moment.
        num_points: how many to keep, at random.
        factor: multiplies the prior's precision, on top of `N / num_points`.

    Raises:
        ValueError: more points than there are, or none; a factor that is not positive.
    """

    def __init__(self, loader: Iterable[Any], num_points: int | None, factor: float) -> None:
        inputs, targets = collect(loader)
        total = len(targets)
        self.num_points = total if num_points is None else num_points
        if not 1 <= self.num_points <= total:
            raise ValueError(
                f"num_points is {num_points}; expected 1 to {total}, the number of points given"
            )
        if not factor > 0:
            raise ValueError(f"factor is {factor}; it multiplies a precision: expected above 0")
        if self.num_points < total:
            inputs = take_rows(inputs, torch.randperm(total)[: self.num_points])
        self.inputs, self.factor = inputs, factor
        self._of: tuple[Any, GPPredictive] | None = None

    def process(self, bnn: Any) -> GPPredictive:
        """Return the process for a BNN's net and prior as they are.

        Args:
            bnn: a `LaplaceBNN`.
        """
        # The precision is a new object whenever weights, prior, type or device have changed.
        if self._of is None or self._of[0] is not bnn.net_guide.precision:
            self._of = bnn.net_guide.precision, self._build(bnn)
        return self._of[1]

    def _build(self, bnn: Any) -> GPPredictive:
        device = next(bnn.parameters()).device
        inputs = tree_map_tensors(lambda t: t.to(device), self.inputs)
        features, roots = [], []
        for piece in [inputs] if self.num_points <= POINTS else split_rows(inputs, POINTS):
            linear = linearize(bnn, piece)
            features.append(_features(bnn, linear))
            roots.append(hessian_root(bnn.likelihood, linear.outputs.detach()))
        factor = self.factor * bnn.likelihood.dataset_size / self.num_points
        root = torch.cat(roots) / math.sqrt(bnn._curvature_temperature)
        return GPPredictive(Features.joined(features), root, factor)


def gp_outputs(bnn: Any, inputs: Any) -> Gaussian:
    """Return mean and covariance of outputs, `(n, ...)` and `(n, ..., C, C)`, given the subset.

    Args:
        bnn: a `LaplaceBNN`.
        inputs: a batch.

    Raises:
        RuntimeError: there is no subset.
    """
    if bnn.gp is None:
        raise RuntimeError(
            "predictive='gp' needs some of the data: call fit_gp(loader, num_points) first"
        )
    bnn._fitted()
    process = bnn.gp.process(bnn)
    linear = linearize(bnn, inputs)
    outputs = linear.outputs.detach()
    covariance = process.covariance(_features(bnn, linear))
    return outputs, _by_position(covariance.to(outputs.dtype), outputs)


def _features(bnn: Any, linear: Any) -> Features:
    return output_features(linear, joined(linear.groups, bnn._prior_moments()[1]))


def _by_position(covariance: Tensor, outputs: Tensor) -> Tensor:
    """From all outputs of a point, `(n, K, K)`, to those in the last dimension."""
    classes = outputs.shape[-1] if outputs.dim() > 1 else 1
    split = covariance.view(len(outputs), -1, classes, covariance.shape[-1] // classes, classes)
    blocks = split.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    return blocks.reshape(*(outputs.shape[:-1] or outputs.shape), classes, classes)


# --------------------------------------------------------------------------- refine

METHODS: dict[str, Callable[..., tuple[Tensor, Operator]]] = {
    "laplace": refine_laplace,
    "variational": refine_variational,
}


class RefinedPosterior:
    """A Gaussian over the weights of a BNN's linearised net, about a centre of its own.

    Args:
        bnn: a `LaplaceBNN`, whose net it predicts with.
        loc: the net's weights, where it is linearised, `(P,)`.
        mean: of the Gaussian, `(P,)`.
        precision: of the Gaussian.
    """

    def __init__(self, bnn: Any, loc: Tensor, mean: Tensor, precision: Operator) -> None:
        self.bnn, self.loc, self.mean, self.precision = bnn, loc, mean, precision

    def outputs(self, inputs: Any) -> Gaussian:
        """Return mean and covariance of outputs, `(n, ...)` and `(n, ..., C, C)`.

        Args:
            inputs: a batch.

        Raises:
            RuntimeError: the BNN's weights have changed since.
        """
        linear = linearize(self.bnn, inputs)
        now = joined(linear.groups, self.bnn.mean_values())
        if not torch.equal(now, self.loc.to(now)):
            raise RuntimeError(
                "the net's weights have changed since they were refined: call refine again"
            )
        outputs = linear.outputs.detach()
        rows = jacobian(linear).detach()
        shift = rows @ (self.mean - self.loc).to(rows)
        covariance = self.precision.to(rows).inverse_quadratic(rows)
        return outputs + shift.view_as(outputs), _by_position(covariance, outputs)

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Predict as the BNN does.

        Args:
            inputs: as in `SupervisedBNN.predict`.
            options: `num_predictions`, `aggregate`, `batch_size` and `link`, as there.
        """
        return self.bnn.predict(*inputs, predictive=self.outputs, **options)

    def evaluate(self, input_data: Any, y: Tensor | None = None, **options: Any) -> Any:
        """Return error and log-likelihood as the BNN does.

        Args:
            input_data: as in `SupervisedBNN.evaluate`.
            y: as there.
            options: `num_predictions`, `reduction`, `batch_size` and `link`, as there.
        """
        return self.bnn.evaluate(input_data, y, predictive=self.outputs, **options)


def refined(
    bnn: Any, loader: Iterable[Any], method: str, structure: str, options: dict[str, Any]
) -> RefinedPosterior:
    """Return what `LaplaceBNN.refine` does; see there.

    Args:
        bnn: a `LaplaceBNN`.
        loader: yields `(inputs, targets)`, on the BNN's device.
        method: `"laplace"` or `"variational"`.
        structure: `"full"` or `"diag"`.
        options: of the method.

    Raises:
        ValueError: an unknown method; a `multiplier`; Jacobians that do not fit into memory.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; expected {' or '.join(map(repr, METHODS))}")
    if bnn.multiplier != 1:
        raise ValueError(
            f"multiplier is {bnn.multiplier:g}: it weighs the curvature and not the fit, so that "
            "there is no one objective to refine; set bnn.multiplier = 1.0 for the refinement"
        )
    with modes_restored(bnn):
        bnn.eval()
        model = linear_model(bnn, loader)
    mean, precision = METHODS[method](model, structure, **options)
    return RefinedPosterior(bnn, model.loc, mean, precision)


def linear_model(bnn: Any, loader: Iterable[Any]) -> LinearModel:
    """Return a BNN's linearised net over a data set.

    Args:
        bnn: a `LaplaceBNN`.
        loader: yields `(inputs, targets)`.

    Raises:
        ValueError: the Jacobians do not fit into memory.
    """
    rows, outputs, targets = [], [], []
    groups: list[Any] = []
    points = 0
    for inputs, labels in batches_of(loader):
        linear = linearize(bnn, inputs)
        groups = groups or linear.groups
        check_groups(groups, linear.groups)
        points += linear.points
        _check_room(points, linear)
        rows.append(jacobian(linear).detach())
        outputs.append(linear.outputs.detach())
        targets.append(labels)
    loc, mean, precision = (
        joined(groups, values).detach().to(rows[0])
        for values in (bnn.mean_values(), *bnn._prior_moments())
    )
    data = torch.cat(rows), torch.cat(outputs)
    weight = bnn.likelihood.dataset_size / len(data[0]) / bnn.temperature
    return LinearModel(*data, loc, mean, precision, bnn.likelihood, torch.cat(targets), weight)


def _check_room(points: int, linear: Any) -> None:
    each = linear.outputs[0].numel() * sum(group.size for group in linear.groups)
    check_memory(
        f"the Jacobians of {points:,} points",
        points * each * linear.outputs.element_size(),
        "refine with fewer weights (a prior with expose_modules=[net.last_layer]), or predict with "
        "'glm'",
    )
