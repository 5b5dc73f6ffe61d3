"""Metrics refuse what is no probability, target, score, weight or Gaussian."""

import math
from functools import partial

import pytest
import torch

from tests.oracles.scores import CLASSIFICATION, GAUSSIAN, OOD
from tyxe import metrics

PROBS, TARGETS = torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])
SCORES = torch.tensor([0.1, 0.9])
LOGITS = r"logits\.softmax\(-1\)"
CLASSES = {
    "logits": ((PROBS + 1, TARGETS), ValueError, rf"sum to between 3 and 3; .*{LOGITS}"),
    "negative": ((PROBS - 2, TARGETS), ValueError, rf"probs are -1\.75 and more, .*{LOGITS}"),
    "infinite": ((PROBS / 0, TARGETS), ValueError, "sum to between inf and inf"),
    "nan": ((PROBS * math.nan, TARGETS), ValueError, "probs has 4 NaN entries"),
    "stacked": ((PROBS.expand(3, 2, 2), TARGETS), ValueError, r"mean\(0\)"),
    "one class": ((PROBS[:, :1], TARGETS), ValueError, r"stack\(\[1 - p, p\], -1\)"),
    "flat": ((PROBS[:, 0], TARGETS), ValueError, r"\(2,\); expected \(n, C\)"),
    "empty": ((PROBS[:0], TARGETS), ValueError, "probs is empty"),
    "integer": ((TARGETS, TARGETS), TypeError, r"pass probs\.float"),
    "numpy": ((PROBS.numpy(), TARGETS), TypeError, r"a ndarray; .*torch\.as_tensor\(probs\)"),
    "real targets": ((PROBS, TARGETS.float()), TypeError, r"float32; .*targets\.long"),
    "boolean targets": ((PROBS, TARGETS.bool()), TypeError, "bool; expected integers"),
    "listed targets": ((PROBS, [0, 1]), TypeError, r"torch\.as_tensor\(targets\)"),
    "a column": ((PROBS, TARGETS[:, None]), ValueError, r"\(2, 1\); .*targets\.squeeze\(-1\)"),
    "one-hot": ((PROBS, torch.eye(2).long()), ValueError, r"targets\.argmax\(-1\)"),
    "too large": ((PROBS, TARGETS + 1), ValueError, "from 1 to 2; expected 0..1 for 2 classes"),
    "too small": ((PROBS, TARGETS - 1), ValueError, "from -1 to 0; expected 0..1"),
}
NUMBERS = {
    "column": ((SCORES, 1.0, SCORES[:, None]), ValueError, r"targets\.reshape\(mean\.shape\)"),
    "longer": ((SCORES, 1.0, torch.ones(3)), ValueError, r"targets has shape \(3,\); .*\(2,\)"),
    "scale's shape": ((SCORES, torch.ones(1), SCORES), ValueError, r"scale\.expand_as\(mean\)"),
    "zero scale": ((SCORES, 0.0, SCORES), ValueError, r"scale is 0; .*variance\.sqrt\(\)"),
    "negative scale": ((SCORES, -SCORES, SCORES), ValueError, r"from -0\.9 to -0\.1"),
    "infinite scale": ((SCORES, math.inf, SCORES), ValueError, "positive and finite"),
    "nan scale": ((SCORES, math.nan, SCORES), ValueError, "scale has 1 NaN"),
    "nan mean": ((SCORES * math.nan, 1.0, SCORES), ValueError, "mean has 2 NaN"),
    "nan target": ((SCORES, 1.0, SCORES * math.nan), ValueError, "targets is all NaN"),
    "number": ((SCORES[0], 1.0, SCORES[0]), ValueError, r"mean\.unsqueeze\(0\)"),
    "empty": ((SCORES[:0], 1.0, SCORES[:0]), ValueError, "mean is empty"),
    "integer targets": ((SCORES, 1.0, TARGETS), TypeError, r"pass targets\.float\(\)"),
    "scale's type": ((SCORES, "1", SCORES), TypeError, "scale is '1'"),
}
VECTORS = {
    "probabilities": (PROBS, ValueError, r"shape \(2, 2\); expected \(n,\): .*amax\(-1\)"),
    "nan": (SCORES * math.nan, ValueError, "has 2 NaN entries"),
    "integer": (TARGETS, TypeError, "int64; expected floating point"),
}
MEANS = torch.zeros(3, 2)
OTHERS = {
    "no bins": (metrics.expected_calibration_error, (PROBS, TARGETS, 0), "num_bins is 0"),
    "no broadcasting": (metrics.rmse, (SCORES, SCORES[:, None]), r"targets\.reshape"),
    "level 0": (metrics.interval_coverage, (SCORES, 1.0, SCORES, 0.0), r"level is 0\.0; .*0\.95"),
    "level 95": (metrics.interval_coverage, (SCORES, 1.0, SCORES, 95), "level is 95"),
    "level of a score": (metrics.interval_score, (SCORES, SCORES, SCORES, 1.5), "level is 1.5"),
    "no share": (metrics.fpr_at_tpr, (SCORES, SCORES, 0.0), r"tpr is 0\.0; .*0\.95"),
    "confidences": (metrics.aurc, (PROBS, TARGETS, SCORES[:1]), "confidence has shape"),
    "fractions": (metrics.risk_coverage_curve, (PROBS, TARGETS, None, SCORES), "has fractions"),
    "more weights": (metrics.rmse, (SCORES, SCORES, torch.ones(3)), r"pass mask\.float\(\)"),
    "negative weights": (metrics.rmse, (SCORES, SCORES, -torch.ones(2)), "expected counts"),
    "no weights": (metrics.rmse, (SCORES, SCORES, torch.zeros(2)), "at weights of 0"),
    "no weights of ranks": (
        *(metrics.aurc, (PROBS, TARGETS, None, torch.zeros(2)), "at weights of 0"),
    ),
    "no weights of bins": (
        partial(metrics.expected_calibration_error, weights=torch.zeros(2)),
        *((PROBS, TARGETS), "at weights of 0"),
    ),
    "nothing known": (
        metrics.rmse,
        (SCORES, torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0])),
        "no point counts: look for NaN",
    ),
    "no soft label": (metrics.nll, (PROBS, PROBS + 1), "targets are 1.25 and more"),
    "one sample": (metrics.crps_samples, (SCORES, SCORES), "one for each draw"),
    "one draw": (metrics.lppd, (SCORES,), "a row for each draw"),
    "no transform": (metrics.quantile_calibration_error, (SCORES * 10,), "expected probabilities"),
    "scales": (metrics.crps_mixture, (MEANS, -torch.ones(3, 2), MEANS[0]), "scale ranges"),
}


@pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.calibration_curve])
@pytest.mark.parametrize("case", CLASSES)
def test_classes(metric, case):
    inputs, error, message = CLASSES[case]
    with pytest.raises(error, match=message):
        metric(*inputs)


@pytest.mark.parametrize("metric", GAUSSIAN)
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers(metric, case):
    inputs, error, message = NUMBERS[case]
    with pytest.raises(error, match=message):
        metric(*inputs)


@pytest.mark.parametrize("metric", OOD)
@pytest.mark.parametrize("case", VECTORS)
def test_scores(metric, case):
    scores, error, message = VECTORS[case]
    with pytest.raises(error, match=f"in_scores .*{message}"):
        metric(scores, SCORES)
    with pytest.raises(error, match=f"out_scores .*{message}"):
        metric(SCORES, scores)


@pytest.mark.parametrize("case", OTHERS)
def test_others(case):
    metric, inputs, message = OTHERS[case]
    with pytest.raises(ValueError, match=message):
        metric(*inputs)
