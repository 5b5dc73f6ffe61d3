"""The figure of accuracies over tasks: its heights, errors and refusals."""

import math

import pytest
import torch

from tests.oracles.tasks import ACCURACY
from tyxe import continual, plotting


def test_the_figure_has_means_and_two_standard_errors():
    torch.manual_seed(0)
    runs = torch.rand(4, 3, 3)
    ax = plotting.accuracy_over_tasks({"several": runs, "one": ACCURACY})
    several, one = ax.containers
    average = continual.average_accuracy(runs)
    line, _, (bars,) = several
    torch.testing.assert_close(torch.tensor(line.get_ydata().tolist()), 100 * average.mean(0))
    assert line.get_xdata().tolist() == [1, 2, 3]
    heights = torch.tensor([[y for _, y in segment] for segment in bars.get_segments()])
    torch.testing.assert_close(heights.diff()[:, 0], 400 * average.std(0) / 2, check_dtype=False)
    expected = 100 * continual.average_accuracy(ACCURACY)
    torch.testing.assert_close(torch.tensor(one[0].get_ydata().tolist()), expected)
    assert not one.has_yerr
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["several", "one"]
    assert ax.get_ylabel() == "mean accuracy (%)"


def test_no_two_methods_look_alike():
    ax = plotting.accuracy_over_tasks({f"method {i}": ACCURACY for i in range(25)})
    lines = [container.lines[0] for container in ax.containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 25


def test_the_figure_has_the_tasks_that_all_runs_have_finished():
    runs = torch.rand(2, 4, 4)
    runs[0, 3], runs[1, 2:] = math.nan, math.nan  # stopped after three tasks, and after two
    ax = plotting.accuracy_over_tasks({"stopped": runs, "one": runs[0]})
    several, one = (container[0] for container in ax.containers)
    expected = 100 * continual.average_accuracy(runs)
    assert several.get_xdata().tolist() == [1, 2]
    found = torch.tensor(several.get_ydata().tolist())
    torch.testing.assert_close(found, expected[:, :2].mean(0))
    assert one.get_xdata().tolist() == [1, 2, 3]
    torch.testing.assert_close(torch.tensor(one.get_ydata().tolist()), expected[0, :3])


@pytest.mark.parametrize(
    ("results", "kind", "message"),
    [
        ({}, ValueError, "at least one method"),
        ({"a": torch.rand(2, 3)}, ValueError, r"'a' have shape \(2, 3\)"),
        ({"a": torch.rand(1, 2, 2, 2)}, ValueError, r"expected \(runs, T, T\)"),
        ({"a": torch.rand(3)}, ValueError, r"'a' have shape \(3,\)"),
        ({"a": torch.full((2, 2), math.nan)}, ValueError, "'a' are all NaN after the first"),
        ({"a": torch.tensor([[0.9, 0.0], [math.nan, 0.8]])}, ValueError, r"'a'\] has 1 NaN"),
        ({"a": [[1.0]]}, TypeError, "expected a tensor"),
    ],
)
def test_wrong_figures(results, kind, message):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    with pytest.raises(kind, match=message):
        plotting.accuracy_over_tasks(results)
    assert plt.get_fignums() == before
