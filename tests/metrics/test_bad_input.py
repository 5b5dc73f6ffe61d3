"""Metrics refuse what is no probability, target, score or Gaussian."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.scores import CLASSIFICATION, GAUSSIAN, OOD
from tyxe import metrics

PROBS = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
TARGETS = torch.tensor([0, 1])
META = torch.zeros(2, dtype=torch.long, device="meta")
BAD_PROBS = {
    "logits": (PROBS + 1, ValueError, r"sum to between 3 and 3, .*logits\.softmax\(-1\)"),
    "negative": (PROBS - 2, ValueError, r"smallest -1\.75, .*logits\.softmax\(-1\)"),
    "infinite": (PROBS / 0, ValueError, r"sum to between inf and inf"),
    "nan": (PROBS * math.nan, ValueError, r"`probs` has 4 NaN entries"),
    "stacked": (PROBS.expand(3, 2, 2), ValueError, r"\(3, 2, 2\), expected \(n, C\).*mean\(0\)"),
    "one class": (PROBS[:, :1], ValueError, r"\(2, 1\), expected.*stack\(\[1 - p, p\], -1\)"),
    "flat": (PROBS[:, 0], ValueError, r"\(2,\), expected \(n, C\)"),
    "empty": (PROBS[:0], ValueError, r"`probs` is empty, of shape \(0, 2\)"),
    "integer": (TARGETS, TypeError, r"torch\.int64, expected floating point: pass probs\.float"),
    "numpy": (PROBS.numpy(), TypeError, r"`probs` is of type ndarray.*torch\.as_tensor\(probs\)"),
}
BAD_TARGETS = {
    "float": (TARGETS.float(), TypeError, r"torch\.float32, expected integer: .*targets\.long"),
    "bool": (TARGETS.bool(), TypeError, r"torch\.bool, expected integer"),
    "list": ([0, 1], TypeError, r"of type list, .*torch\.as_tensor\(targets\)"),
    "longer": (torch.tensor([0, 1, 1]), ValueError, r"shape \(3,\), expected \(2,\)"),
    "column": (TARGETS[:, None], ValueError, r"shape \(2, 1\), .*targets\.squeeze\(-1\)"),
    "one-hot": (torch.eye(2), ValueError, r"shape \(2, 2\), .*targets\.argmax\(-1\)"),
    "too large": (TARGETS + 1, ValueError, r"range over 1\.\.2, expected 0\.\.1 for 2 classes"),
    "negative": (TARGETS - 1, ValueError, r"range over -1\.\.0, expected 0\.\.1"),
    "elsewhere": (META, ValueError, r"on meta, expected cpu, .*targets\.to\(probs\.device\)"),
}
SCORES = torch.tensor([0.1, 0.9])
BAD_SCORES = {
    "probabilities": (PROBS, ValueError, r"shape \(2, 2\), expected \(n,\): .*amax\(-1\)"),
    "empty": (SCORES[:0], ValueError, r"is empty, of shape \(0,\)"),
    "nan": (SCORES * math.nan, ValueError, r"has 2 NaN entries"),
    "integer": (TARGETS, TypeError, r"torch\.int64, expected floating point"),
    "list": ([0.1], TypeError, r"of type list"),
}
BAD_GAUSSIAN = {
    "column": ((SCORES, 1.0, SCORES[:, None]), ValueError, r"targets\.reshape\(mean\.shape\)"),
    "longer": ((SCORES, 1.0, torch.ones(3)), ValueError, r"`targets` has shape \(3,\), .*\(2,\)"),
    "scale's shape": ((SCORES, torch.ones(1), SCORES), ValueError, r"scale\.expand_as\(mean\)"),
    "zero scale": ((SCORES, 0.0, SCORES), ValueError, r"from 0 to 0, .*variance\.sqrt\(\)"),
    "negative scale": ((SCORES, -SCORES, SCORES), ValueError, r"from -0\.9 to -0\.1"),
    "infinite scale": ((SCORES, math.inf, SCORES), ValueError, r"positive and finite"),
    "nan scale": ((SCORES, math.nan, SCORES), ValueError, r"`scale` has 1 NaN"),
    "nan mean": ((SCORES * math.nan, 1.0, SCORES), ValueError, r"`mean` has 2 NaN"),
    "nan target": ((SCORES, 1.0, SCORES * math.nan), ValueError, r"`targets` has 2 NaN"),
    "number": ((SCORES[0], 1.0, SCORES[0]), ValueError, r"mean\.unsqueeze\(0\)"),
    "empty": ((SCORES[:0], 1.0, SCORES[:0]), ValueError, r"`mean` is empty"),
    "integer targets": ((SCORES, 1.0, TARGETS), TypeError, r"pass targets\.float\(\)"),
    "scale's type": ((SCORES, "1", SCORES), TypeError, r"`scale` is of type str"),
}


class TestBadInput:
    @pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.calibration_curve])
    @pytest.mark.parametrize("case", BAD_PROBS)
    def test_probs(self, metric: Callable[..., Any], case: str) -> None:
        probs, error, message = BAD_PROBS[case]
        with pytest.raises(error, match=message):
            metric(probs, TARGETS)

    @pytest.mark.parametrize("case", BAD_PROBS)
    def test_probs_of_entropy(self, case: str) -> None:
        probs, error, message = BAD_PROBS[case]
        with pytest.raises(error, match=message):
            metrics.predictive_entropy(probs)

    @pytest.mark.parametrize("metric", [*CLASSIFICATION, metrics.calibration_curve])
    @pytest.mark.parametrize("case", BAD_TARGETS)
    def test_targets(self, metric: Callable[..., Any], case: str) -> None:
        targets, error, message = BAD_TARGETS[case]
        with pytest.raises(error, match=message):
            metric(PROBS, targets)

    @pytest.mark.parametrize(
        "metric", [metrics.expected_calibration_error, metrics.calibration_curve]
    )
    def test_bins(self, metric: Callable[..., Any]) -> None:
        with pytest.raises(ValueError, match="`num_bins` is 0, expected at least 1"):
            metric(PROBS, TARGETS, num_bins=0)

    @pytest.mark.parametrize("metric", OOD)
    @pytest.mark.parametrize("case", BAD_SCORES)
    def test_scores(self, metric: Callable[..., Tensor], case: str) -> None:
        scores, error, message = BAD_SCORES[case]
        with pytest.raises(error, match=f"`in_scores`.*{message}"):
            metric(scores, SCORES)
        with pytest.raises(error, match=f"`out_scores`.*{message}"):
            metric(SCORES, scores)

    @pytest.mark.parametrize("metric", GAUSSIAN)
    @pytest.mark.parametrize("case", BAD_GAUSSIAN)
    def test_gaussian(self, metric: Callable[..., Tensor], case: str) -> None:
        inputs, error, message = BAD_GAUSSIAN[case]
        with pytest.raises(error, match=message):
            metric(*inputs)

    def test_rmse_does_not_broadcast(self) -> None:
        with pytest.raises(ValueError, match=r"targets\.reshape\(mean\.shape\)"):
            metrics.rmse(SCORES, SCORES[:, None])

    @pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
    def test_level(self, level: float) -> None:
        with pytest.raises(ValueError, match=r"`level` is .*, expected within \(0, 1\)"):
            metrics.interval_coverage(SCORES, 1.0, SCORES, level)
