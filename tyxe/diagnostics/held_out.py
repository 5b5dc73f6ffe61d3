"""Whether held-out data are as probable as they should be: fit, calibration, draws, batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tyxe import metrics
from tyxe.bnn import DropoutBNN, VariationalBNN
from tyxe.bnn.scoring import Predicted
from tyxe.check import described
from tyxe.data import Targets
from tyxe.diagnostics.report import (
    ANY,
    Case,
    Line,
    above,
    below,
    integral_transform,
    log_likelihoods,
    mixed,
    spared,
)
from tyxe.guides import Guide
from tyxe.metrics.checks import average
from tyxe.poutine import report
from tyxe.predictive.forwards import fewest_rows, norms_of
from tyxe.util import is_plain

# Data sets that are drawn from predictions, by which a calibration error is judged.
SIMULATED = 200
# Error by chance of a log-likelihood that draws are to have, in nats per point.
CHANCE = 0.01
MORE_SPREAD = "an ensemble, or a posterior with more spread"
LESS_SPREAD = (
    "train longer, a narrower prior (a LaplaceBNN: optimize_prior_precision(loader=held_out)), "
    "or a posterior with less spread"
)


def fit(case: Case) -> Iterator[Line]:
    """Compare the log-likelihood of training and held-out data, and the draws that these need."""
    train, held_out = case.mean(case.fitted, case.train), case.mean(case.seen, case.held_out)
    yield Line("log-likelihood of held-out data", held_out)
    yield Line(
        "log-likelihood of training above held-out data",
        train - held_out,
        below(0.5),
        below(2.0),
        "the fit does not generalise: stop early by validation=held_out, patience=5, take more "
        "data or a narrower prior",
    )
    if case.seen.dim() == 2 and len(case.seen) > 1:
        yield Line(
            f"draws for an error of {CHANCE} nats",
            _needed(case.seen, case.weights(case.held_out)),
            below(float(len(case.seen))),
            ANY,
            "predict with this many draws, by num_predictions",
        )
    if isinstance(case.bnn, VariationalBNN) and isinstance(case.bnn.net_guide, Guide):
        yield from _in_a_handler(case, held_out)


def _in_a_handler(case: Case, out_of_it: float) -> Iterator[Line]:
    """Compare draws for each row with draws for all rows, where the handler makes such draws."""
    with report() as uses, spared():
        logs = log_likelihoods(case.bnn, case.held_out, **case.options)
    if not any(row.treatment == "moments" for row in uses):
        return  # both are draws for all rows
    weights = case.weights(case.held_out)
    chance = 2 * math.hypot(_standard_error(logs, weights), _standard_error(case.seen, weights))
    yield Line(
        "log-likelihood in a handler less that out of it",
        case.mean(logs, case.held_out) - out_of_it,
        (-0.1 - chance, 0.1 + chance),
        (-1.0 - chance, 1.0 + chance),
        "draws for each row and draws for all rows are different predictions: evaluate both "
        "ways, and predict as you will in use",
    )


def _standard_error(logs: Tensor, weights: Tensor) -> float:
    """Return the standard error over draws of a mean log-likelihood, to first order."""
    if logs.dim() < 2 or len(logs) < 2:
        return 0.0
    relative = (logs - mixed(logs)).exp() @ weights.to(logs)
    return float(relative.std() / weights.sum()) / math.sqrt(len(logs))


def _needed(logs: Tensor, weights: Tensor) -> float:
    """Return the number of draws whose log-likelihood has an error of `CHANCE`, by first orders."""
    relative = (logs - mixed(logs)).exp()  # p_s / mean p, of points
    share = weights.to(relative) / weights.sum()
    spread = float((relative @ share).var())
    bias = 0.5 * float(relative.var(0) @ share)
    # The root of `spread / S + (bias / S)^2 = CHANCE^2`.
    half = spread / (2 * CHANCE**2)
    return math.ceil(half + math.sqrt(half**2 + (bias / CHANCE) ** 2))


def calibration(case: Case) -> Iterator[Line]:
    """Compare calibration with that of data that are drawn from the predictions themselves."""
    judged = case.predicted
    if judged.kind == "classes":
        probs, y, weights = judged.classes()
        yield from _of_classes(probs, y, weights)
        mass = torch.ones_like(probs[:, 0]) if weights is None else weights.to(probs)
        rates = torch.zeros_like(probs[0]).index_add(0, y, mass).double()
        constant = float(torch.special.xlogy(rates, rates / rates.sum()).sum() / rates.sum())
    elif judged.kind == "numbers":
        yield from _of_numbers(judged)
        constant = _of_normal(judged.targets)
    else:
        return
    yield Line(
        "log-likelihood above that of a constant",
        case.mean(case.seen, case.held_out) - constant,
        above(0.0),
        above(-1.0),
        "predictions are worse than a constant: train on, or check the noise",
    )


def _of_normal(targets: Targets) -> float:
    """Return the mean log-likelihood of points under the Normal of each of their numbers."""
    y, counts = targets.values.double().reshape(len(targets), -1), targets.counts_within()
    each = torch.ones_like(y) if counts is None else counts.to(y).reshape(y.shape)
    total = each.sum(0).clamp_min(1e-12)
    mean = (each * y).sum(0) / total
    variance = (each * (y - mean).square()).sum(0) / (total - 1).clamp_min(1e-12)
    law = torch.distributions.Normal(mean, variance.sqrt().clamp_min(1e-6))
    points = len(y) if targets.weights is None else targets.weights.sum()
    return float((each * law.log_prob(y)).sum() / points)


def _of_classes(probs: Tensor, y: Tensor, weights: Tensor | None) -> Iterator[Line]:
    error = partial(metrics.expected_calibration_error, weights=weights)
    limit = _limit([error(probs, torch.multinomial(probs, 1)[:, 0]) for _ in range(SIMULATED)])
    is_sure = bool(average(probs.amax(-1), weights) > metrics.accuracy(probs, y, weights))
    entropy = average(metrics.predictive_entropy(probs), weights)
    yield Line("mean entropy of predictions", float(entropy))
    yield Line(
        "expected calibration error",
        float(error(probs, y)),
        below(limit),
        below(limit + 0.1),
        f"too {'' if is_sure else 'un'}certain: tyxe.calibration.TemperatureScaling by other "
        f"held-out data, {MORE_SPREAD if is_sure else LESS_SPREAD}",
    )


def _of_numbers(judged: Predicted) -> Iterator[Line]:
    pit, weights = integral_transform(judged)
    error = partial(metrics.quantile_calibration_error, weights=weights)
    limit = _limit([error(torch.rand_like(pit)) for _ in range(SIMULATED)])
    is_wide = bool(average(((pit - 0.5).abs() < 0.45).to(pit), weights) > 0.9)
    scale = average(judged.numbers()[1], weights)
    yield Line("mean standard deviation of predictions", float(scale))
    yield Line(
        "quantile calibration error",
        float(error(pit)),
        below(limit),
        below(limit + 0.05),
        f"too {'un' if is_wide else ''}certain: fit the noise (scale=dist.LogNormal(0., 1.) of the "
        "likelihood), tyxe.calibration.ScaleFactor by other held-out data, "
        f"{LESS_SPREAD if is_wide else MORE_SPREAD}",
    )


def _limit(found: list[Tensor]) -> float:
    """Return what 99 in 100 calibrated predictions stay below, and .02 at least."""
    return max(float(torch.stack(found).quantile(0.99)), 0.02)


def batches(case: Case) -> Iterator[Line]:
    """Look for predictions that depend on the batch, and norms with statistics of other weights."""
    bnn, inputs = case.bnn, case.held_out[0][0]
    rows = len(inputs) if isinstance(inputs, Tensor) else 0
    fewest = max(fewest_rows(member.net, train=False) for member in bnn._bnns)
    if rows // 2 >= fewest and not isinstance(bnn, DropoutBNN):
        found = [
            bnn.predict(inputs, num_predictions=0, batch_size=size)
            for size in (rows, math.ceil(rows / 2))
        ]
        whole, apart = (each[0] if isinstance(each, tuple) else each for each in found)
        if isinstance(whole, Tensor) and whole.shape == apart.shape:
            yield Line(
                "change of predictions by their batch",
                float((whole - apart).abs().max() / whole.std().clamp_min(1e-9)),
                below(0.01),
                below(1.0),
                "predictions of a row depend on other rows, as with BatchNorm in train mode or "
                "without running statistics: give it these, and predict in eval mode",
            )
    if any(norms_of(member.net) for member in bnn._bnns):
        other = copy.deepcopy(bnn)
        other.update_norm_statistics(case.train)
        before, after = (
            case.mean(log_likelihoods(each, case.train, num_predictions=0), case.train)
            for each in (bnn, other)
        )
        yield Line(
            "log-likelihood gained by new norm statistics",
            after - before,
            below(0.05),
            below(0.5),
            "BatchNorm has the statistics of other weights: call update_norm_statistics(loader)",
        )


def beside(plain: Any) -> Callable[[Case], Iterator[Line]]:
    """Return a check that compares with a plain net, as a fitted BNN of the same likelihood."""
    if not hasattr(plain, "evaluate"):
        raise TypeError(
            f"plain is {described(plain)}; expected the net trained in the same code, as a "
            "VariationalBNN with IIDPrior(..., hide_all=True) and no guide"
        )

    def check(case: Case) -> Iterator[Line]:
        gain = mixed(case.seen) - mixed(log_likelihoods(plain, case.held_out, **case.options))
        error = 2 * float(gain.std()) / math.sqrt(len(gain)) if len(gain) > 1 else 0.0
        yield Line(
            "log-likelihood above the plain net's",
            case.mean(gain, case.held_out),
            above(-error),
            above(-error - 0.1),
            "the plain net is better: start the posterior at its weights with small scales, or "
            "take Laplace or an ensemble of plain nets",
        )

    return check


def inputs(case: Case) -> Iterator[Line]:
    """Compare the inputs of held-out data with those of training data."""
    both = seen, held_out = [_floating(each) for each in (case.to_fit, case.held_out)]
    shapes = [[x.shape[1:] for x in each] for each in both]
    if not seen or shapes[0] != shapes[1] or any(len({*map(len, each)}) > 1 for each in both):
        return  # such as graphs, or sequences of other lengths
    means = [x.mean(0) for x in seen]
    others, own = (
        torch.stack([(x - m).square().sum(1) for x, m in zip(each, means, strict=True)]).sum(0)
        for each in (held_out, seen)
    )
    if usual := float(own.mean()):
        # Of the root of a ratio of means, for points like those of training.
        error = float(own.std()) / usual / 2 * math.sqrt(1 / len(own) + 1 / len(others))
        chance = (1 + error) ** 3
        yield Line(
            "spread of held-out inputs over that of training ones",
            math.sqrt(float(others.mean()) / usual),
            (min(0.6, 1 / chance), max(1.5, chance)),
            (min(0.3, 0.5 / chance), max(3.0, 2 * chance)),
            "held-out data are not like training data: standardise both by the training data's "
            "mean and standard deviation, and split after shuffling; no other line is about the "
            "fit",
        )


def _floating(batches: list[Any]) -> list[Tensor]:
    """Return the real arguments of the net, of all points, as rows; none where they cannot be."""
    parts = [tree_leaves(inputs) for inputs, _ in batches]
    # Objects and sparse tensors, as of a graph, have no columns.
    if not all(is_plain(x) and x.dim() >= 2 for leaves in parts for x in leaves):
        return []
    columns = [[x.flatten(1) for x in leaves] for leaves in zip(*parts, strict=True)]
    same = [c for c in columns if c[0].is_floating_point() and len({x.shape[1] for x in c}) == 1]
    return [torch.cat(column).double() for column in same]


CHECKS = (inputs, fit, calibration, batches)
