"""Metrics in every dtype, on strided scores, many points and a GPU."""

import pytest
import torch

from tests.oracles.scores import (
    CLASSIFICATION,
    DTYPES,
    GAUSSIAN,
    OOD,
    assert_scalar,
    classified,
    gaussians,
    scored,
)
from tyxe import metrics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", [*CLASSIFICATION, lambda p, _: metrics.predictive_entropy(p)])
def test_classification(metric, dtype):
    """Eighths are exact in every dtype, so that all differ by arithmetic alone."""
    generator = torch.Generator().manual_seed(12)
    draws = torch.randint(3, (40, 8), generator=generator)
    probs = torch.nn.functional.one_hot(draws).double().mean(1)
    targets = draws[:, 0]
    value = metric(probs.to(dtype), targets)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(value.double(), metric(probs, targets), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", [*OOD, *GAUSSIAN])
def test_scores_and_numbers(metric, dtype):
    rounded = [v.to(dtype) for v in (scored(13) if metric in OOD else gaussians(14))]
    value = metric(*rounded)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 1e-6 if metric in OOD else 1e-5
    assert_scalar(value, metric(*[v.double() for v in rounded]).item(), tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_in_any_dtype_sums_to_one(dtype):
    logits = 5 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(200, dtype=torch.long)
    assert metrics.nll(logits.to(dtype).softmax(-1), targets) > 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_of_any_width_are_targets(dtype):
    probs, targets = classified(15)
    for metric in CLASSIFICATION:
        assert metric(probs, targets.to(dtype)) == metric(probs, targets)


def test_strided_scores():
    """`torch.searchsorted` warns of them, and warnings are errors."""
    scores = torch.stack(scored(16, 20, 20), -1)
    for metric in OOD:
        expected = metric(scores[:, 0].contiguous(), scores[:, 1].contiguous())
        assert metric(scores[:, 0], scores[:, 1]) == expected


def test_many_points_stay_exact():
    """A million against a million: neither their product nor a float32 sum is formed."""
    num_points = 1_000_000
    scores = torch.arange(num_points, dtype=torch.float32)
    assert_scalar(metrics.ood_auroc(scores + 0.5, scores), 0.5 + 0.5 / num_points, 1e-7)
    probs = torch.tensor([[0.7, 0.3]]).expand(num_points, 2)
    targets = (torch.arange(num_points) % 10 >= 7).long()
    assert metrics.expected_calibration_error(probs, targets) < 1e-7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda():
    groups = (CLASSIFICATION, classified(17)), (OOD, scored(17)), (GAUSSIAN, gaussians(17))
    for metric, inputs in ((metric, inputs) for group, inputs in groups for metric in group):
        value = metric(*(v.cuda() for v in inputs))
        assert value.is_cuda
        torch.testing.assert_close(value.cpu(), metric(*inputs))
