"""Metrics of continual learning by hand."""

import pytest
import torch

from tests.oracles.tasks import ACCURACY
from tyxe import continual


def test_metrics_by_hand():
    torch.testing.assert_close(
        continual.average_accuracy(ACCURACY), torch.tensor([0.9, 0.875, 2.54 / 3])
    )
    # Since the best of each: 0.95 to 0.70, and 0.80 to 0.85.
    torch.testing.assert_close(
        continual.forgetting(ACCURACY), torch.tensor([0.0, -0.05, (0.25 - 0.05) / 2])
    )
    baseline = torch.tensor([0.5, 0.4, 0.5])
    transfer = continual.forward_transfer(ACCURACY, baseline)
    assert transfer.item() == pytest.approx((0.10 + 0.10) / 2)


@pytest.mark.parametrize(
    "metric",
    [continual.average_accuracy, continual.forgetting],
    ids=lambda metric: metric.__name__,
)
def test_metrics_take_several_runs_and_ignore_the_upper_triangle(metric):
    torch.manual_seed(0)
    runs = torch.rand(2, 4, 3, 3)
    each = torch.stack([torch.stack([metric(run) for run in group]) for group in runs])
    torch.testing.assert_close(metric(runs), each)
    torch.testing.assert_close(metric(runs.masked_fill(~torch.ones(3, 3).tril().bool(), 9)), each)


NOT_MEASURED = ACCURACY.where(torch.ones(3, 3).tril().bool(), torch.nan)


@pytest.mark.parametrize(
    ("metric", "matrices", "message"),
    [
        (continual.average_accuracy, (torch.ones(2, 3),), r"\(2, 3\); expected \(3, 3\)"),
        (continual.forgetting, ([[1.0]],), "accuracy is a list; expected a tensor"),
        (continual.forward_transfer, (torch.ones(1, 1), torch.ones(1)), "tasks is 1; expected 2"),
        (continual.forward_transfer, (NOT_MEASURED, torch.ones(3)), "ahead=True"),
        (continual.forward_transfer, (ACCURACY, torch.ones(2)), r"shape \(2,\)"),
    ],
)
def test_wrong_matrices(metric, matrices, message):
    with pytest.raises((TypeError, ValueError), match=message):
        metric(*matrices)
