"""Contracts of `tyxe.plotting`: what is drawn, on which axes, under which labels."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.oracles.scores import classified
from tests.oracles.tasks import ACCURACY
from tyxe import continual, metrics, plotting

matplotlib = pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

X = torch.linspace(-1, 1, 9)
SCORES = torch.tensor([0.9, 0.8, 0.7, 0.4]), torch.tensor([0.5, 0.3])
PROBS, TARGETS = classified(0)
FITTED = SimpleNamespace(
    loss=[9.0, 5.0, 4.0], log_likelihood=[-8.0, -3.0, -1.0], kl=[1.0, 2.0, 3.0]
)


@pytest.fixture(autouse=True)
def closed_figures():
    # doctests, which have no fixtures, may have left some open
    plt.close("all")
    yield
    plt.close("all")


def line(ax, label):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


ON_AXES = {
    "predictive_band": lambda ax=None: plotting.predictive_band(X, X, 0.1, ax),
    "calibration_curve": lambda ax=None: plotting.calibration_curve(PROBS, TARGETS, ax),
    "entropy_ecdf": lambda ax=None: plotting.entropy_ecdf(torch.rand(5), ax),
    "ood_histogram": lambda ax=None: plotting.ood_histogram(*SCORES, ax),
    "history": lambda ax=None: plotting.history(FITTED, ax),
    "risk_coverage": lambda ax=None: plotting.risk_coverage(PROBS, TARGETS, ax),
    "pit_histogram": lambda ax=None: plotting.pit_histogram(torch.rand(30), ax),
    "qq": lambda ax=None: plotting.qq(torch.rand(30), ax),
}


@pytest.mark.parametrize("name", ON_AXES)
def test_given_axes_are_drawn_on_and_a_figure_made_without(name):
    figure, ax = plt.subplots()
    assert ON_AXES[name](ax) is ax
    assert ax.has_data()
    assert plt.get_fignums() == [figure.number]
    own = ON_AXES[name]()
    assert plt.get_fignums() == [figure.number, own.figure.number]
    assert own.get_xlabel()
    assert own.get_ylabel()
    own.figure.canvas.draw()
    assert np.asarray(own.figure.canvas.buffer_rgba()).std() > 0


# --- numbers ------------------------------------------------------------------------------------


def test_bands_are_whole_scales_around_the_mean_whatever_the_order():
    order = torch.randperm(len(X))
    x, mean, scale = (v[order, None] for v in (X, X.sin(), 0.1 + X.square()))
    ax = plotting.predictive_band(x, mean, scale, num_scales=2, true_function=X.cos()[order])
    # `orig=False`: what is drawn, an array. What was passed, matplotlib may keep as it was.
    heights = line(ax, "predictive mean").get_ydata(orig=False)
    torch.testing.assert_close(torch.tensor(heights).float(), X.sin())
    np.testing.assert_allclose(line(ax, "true function").get_ydata(), X.cos())
    assert len(ax.collections) == 2
    for k, band in zip((2, 1), ax.collections, strict=True):
        outline = torch.as_tensor(band.get_paths()[0].vertices).float()
        for at, m, s in zip(x, mean, scale, strict=True):
            heights = outline[outline[:, 0] == at, 1]
            torch.testing.assert_close(heights.max(), (m + k * s)[0])
            torch.testing.assert_close(heights.min(), (m - k * s)[0])


def test_bands_beside_data():
    data = (torch.tensor([0.3, -0.5]), torch.tensor([1.0, 2.0]))
    ax = plotting.predictive_band(X, X, 0.1, train_data=data, true_function=2 * X, label="MF")
    assert legend_texts(ax) == ["MF", "true function", "data"]
    np.testing.assert_allclose(line(ax, "data").get_xydata(), torch.stack(data, -1).double())
    assert line(ax, "data").get_linestyle() == "None"


@pytest.mark.parametrize(
    ("mean", "scale"),
    [
        (X, 1),
        (X, torch.tensor(1.0)),
        (X, torch.ones(9, 1)),
        (X.bfloat16().requires_grad_(), torch.ones(9).bfloat16().requires_grad_()),
    ],
)
def test_bands_of_one_number_or_one_per_point_with_gradients_or_without(mean, scale):
    expected = plotting.predictive_band(X, mean.detach().float(), torch.ones(9))
    drawn = plotting.predictive_band(X, mean, scale)
    assert drawn.get_ylim() == pytest.approx(expected.get_ylim())


def test_quantiles_of_calibrated_predictions_lie_on_the_diagonal():
    y = torch.randn(2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ax = plotting.qq(metrics.gaussian_pit(0 * y, 2.0, y), label="wide")
    expected, found = ax.lines[-1].get_data()
    assert np.polyfit(expected, found, 1)[0] == pytest.approx(0.5, abs=0.02)
    assert len(plotting.qq(torch.tensor([0.0, 0.5, torch.nan, 1.0])).lines[-1].get_xdata()) == 1
    assert legend_texts(ax) == ["wide"]


def test_calibrated_points_lie_in_the_bands():
    pit = torch.rand(4_000, dtype=torch.float64)
    ax = plotting.pit_histogram(pit, num_bins=40)
    (low, high) = ax.collections[0].get_paths()[0].get_extents().intervaly
    heights = torch.histc(pit, 40, 0, 1) * 40 / 4_000
    assert ((heights > low) & (heights < high)).double().mean() > 0.85
    ax = plotting.qq(pit)
    expected, found = map(torch.as_tensor, ax.lines[-1].get_data())
    outline = torch.as_tensor(ax.collections[0].get_paths()[0].vertices)
    half = (outline[:, 1] - outline[:, 0]).abs().max()
    assert (found - expected).abs().max() < 3 * half
    certain = torch.special.ndtr(2 * torch.special.ndtri(pit))
    heights = torch.histc(certain, 40, 0, 1) * 40 / 4_000
    assert not low < heights[0] < high


# --- classes ------------------------------------------------------------------------------------


def test_points_of_calibration_curves_are_the_metrics():
    ax = plotting.calibration_curve(PROBS, TARGETS, num_bins=5, min_count=1, label="a")
    plotting.calibration_curve(*classified(1), ax, label="b")
    assert len(ax.lines) == 3
    diagonal, drawn, other = ax.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert drawn.get_color() != other.get_color()
    ece = 100 * metrics.expected_calibration_error(PROBS, TARGETS, num_bins=5)
    assert legend_texts(ax)[0] == f"a (ECE {ece:.1f} %)"
    curve = metrics.calibration_curve(PROBS, TARGETS, num_bins=5)
    np.testing.assert_allclose(drawn.get_xdata(), curve.confidence)
    np.testing.assert_allclose(drawn.get_ydata(), curve.accuracy)
    alone = plotting.calibration_curve(PROBS, TARGETS, num_bins=5)
    assert legend_texts(alone) == [f"ECE {ece:.1f} %"]


def test_calibration_curve_leaves_sparse_bins_out():
    probs = torch.tensor([[0.9, 0.1]] * 5 + [[0.6, 0.4]])
    targets = torch.zeros(6, dtype=torch.long)
    some, by_default, every = (
        plotting.calibration_curve(probs, targets, **options).lines[-1]
        for options in ({"min_count": 2}, {}, {"min_count": 1})
    )
    for drawn in (some, by_default):
        assert drawn.get_xdata() == pytest.approx([0.9])
    assert every.get_xdata() == pytest.approx([0.6, 0.9])
    # The error is that of all bins.
    assert every.get_label() == some.get_label()


def test_bars_of_calibration_curves_are_wilsons():
    probs = torch.tensor([[0.9, 0.1]] * 40)
    targets = torch.tensor([0] * 30 + [1] * 10)
    bars, shades = plotting.calibration_curve(probs, targets).collections
    expected = stats.binomtest(30, 40).proportion_ci(0.95, "wilson")
    ((_, low), (_, high)) = bars.get_segments()[0]
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert shades.get_sizes().tolist() == [800]


def test_a_weight_of_two_is_drawn_as_the_point_twice():
    probs, targets = classified(0)
    weights = torch.arange(len(probs)) % 3
    again = torch.arange(len(probs)).repeat_interleave(weights)
    one = plotting.calibration_curve(probs, targets, weights=weights.double())
    other = plotting.calibration_curve(probs[again], targets[again])
    same = partial(np.testing.assert_allclose, rtol=1e-5)
    same(one.lines[-1].get_xydata(), other.lines[-1].get_xydata())
    same(one.collections[0].get_segments(), other.collections[0].get_segments())
    same(one.collections[1].get_sizes(), other.collections[1].get_sizes())
    assert legend_texts(one) == legend_texts(other)

    pit = torch.rand(len(probs)).where(torch.arange(len(probs)) != 1, torch.nan)
    one = plotting.pit_histogram(pit, weights=weights.double())
    other = plotting.pit_histogram(pit[again])
    same(one.patches[0].get_xy(), other.patches[0].get_xy())
    band, expected = (ax.collections[0].get_paths()[0].vertices for ax in (one, other))
    same(band, expected)


def test_steps_count_the_entropies_below():
    entropy = torch.tensor([0.5, 0.1, 0.5, 1.0])
    drawn = plotting.entropy_ecdf(entropy, max_entropy=1.5).lines[0]
    assert drawn.get_drawstyle() == "steps-post"
    np.testing.assert_allclose(drawn.get_xdata(), [0, 0.1, 0.5, 0.5, 1.0, 1.5], rtol=1e-6)
    np.testing.assert_allclose(drawn.get_ydata(), [0, 0.25, 0.5, 0.75, 1, 1])
    certain = plotting.entropy_ecdf(torch.zeros(3)).lines[0]
    assert certain.get_ydata()[-1] == 1
    assert set(certain.get_xdata(orig=False)) == {0}


def test_styles_and_labels_of_entropies():
    ax = plotting.entropy_ecdf(torch.rand(4), label="OOD", linestyle="dashed", color="black")
    assert legend_texts(ax) == ["OOD"]
    assert (ax.lines[0].get_linestyle(), ax.lines[0].get_color()) == ("--", "black")
    assert plotting.entropy_ecdf(torch.rand(4)).get_legend() is None


def test_histograms_of_scores_are_fractions_over_shared_bins():
    ax = plotting.ood_histogram(*SCORES, num_bins=6, score="maximal probability")
    assert len(ax.patches) == 2
    for scores, patch in zip(SCORES, ax.patches, strict=True):
        heights, _ = np.histogram(scores, bins=6, range=(0.3, 0.9))
        drawn = sorted({*patch.get_xy()[:, 1].round(6)})
        assert drawn == sorted({0.0, *(heights / len(scores)).round(6)})
        edges = patch.get_xy()[:, 0]
        assert (edges.min(), edges.max()) == pytest.approx((0.3, 0.9))
    assert legend_texts(ax) == ["in-distribution", "out-of-distribution"]
    assert ax.get_legend().get_title().get_text() == "AUROC 0.875"
    assert ax.get_xlabel() == "maximal probability"
    equal = plotting.ood_histogram(torch.ones(3), torch.ones(2))
    assert equal.get_legend().get_title().get_text() == "AUROC 0.500"


def test_risk_coverage_is_the_curve():
    ax = plotting.risk_coverage(PROBS, TARGETS, label="MAP")
    curve = metrics.risk_coverage_curve(PROBS, TARGETS)
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), curve.risk)
    assert ax.lines[-1].get_label() == f"MAP (AURC {metrics.aurc(PROBS, TARGETS):.3f})"


def test_a_second_call_cuts_nothing():
    few, many = torch.rand(20), 5 * torch.rand(20)
    ax = plotting.entropy_ecdf(few)
    plotting.entropy_ecdf(many, ax)
    assert ax.get_xlim()[0] == 0
    assert ax.get_xlim()[1] >= many.max()
    ax = plotting.risk_coverage(PROBS, PROBS.argmax(-1))
    plotting.risk_coverage(*classified(1), ax)
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] >= ax.lines[-1].get_ydata().max()


# --- training -----------------------------------------------------------------------------------


def test_history_draws_three_curves_that_differ_without_colour():
    ax = plotting.history(FITTED)
    curves = {"loss": FITTED.loss, "negative log-likelihood": [8, 3, 1], "KL": FITTED.kl}
    for label, values in curves.items():
        assert list(line(ax, label).get_xdata()) == [1, 2, 3]
        assert list(line(ax, label).get_ydata()) == values
    assert len({drawn.get_linestyle() for drawn in ax.lines}) == 3


def test_first_epochs_do_not_flatten_the_others():
    def drawn(loss):
        log_likelihood, kl = [-value for value in loss], [1.0] * len(loss)
        fitted = SimpleNamespace(loss=loss, log_likelihood=log_likelihood, kl=kl)
        return plotting.history(fitted)

    loss = [1e4, 5e3, 1e3, *(10 - epoch / 10 for epoch in range(40))]
    ax = drawn(loss)
    assert ax.get_ylim()[1] < 20
    (inset,) = ax.child_axes
    assert inset.get_ylim()[1] > 1e4
    assert drawn(loss[3:]).child_axes == []


def heights_of(container):
    return torch.tensor(container[0].get_ydata().tolist())


def test_accuracies_have_means_and_two_standard_errors():
    runs = torch.rand(4, 3, 3)
    ax = plotting.accuracy_over_tasks({"several": runs, "one": ACCURACY})
    several, one = ax.containers
    average = continual.average_accuracy(runs)
    torch.testing.assert_close(heights_of(several), 100 * average.mean(0))
    assert several[0].get_xdata().tolist() == [1, 2, 3]
    bars = torch.tensor([[y for _, y in segment] for segment in several[2][0].get_segments()])
    torch.testing.assert_close(bars.diff()[:, 0], 400 * average.std(0) / 2, check_dtype=False)
    torch.testing.assert_close(heights_of(one), 100 * continual.average_accuracy(ACCURACY))
    assert not one.has_yerr
    assert legend_texts(ax) == ["several", "one"]
    assert ax.get_ylabel() == "mean accuracy (%)"


def test_no_two_methods_look_alike():
    ax = plotting.accuracy_over_tasks({f"method {i}": ACCURACY for i in range(25)})
    lines = [container.lines[0] for container in ax.containers]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 25


def test_accuracies_are_of_the_tasks_that_all_runs_have_finished():
    runs = torch.rand(2, 4, 4)
    runs[0, 3], runs[1, 2:] = math.nan, math.nan  # stopped after three tasks, and after two
    several, one = plotting.accuracy_over_tasks({"stopped": runs, "one": runs[0]}).containers
    expected = 100 * continual.average_accuracy(runs)
    torch.testing.assert_close(heights_of(several), expected[:, :2].mean(0))
    torch.testing.assert_close(heights_of(one), expected[0, :3])
    assert several[0].get_xdata().tolist() == [1, 2]
    assert one[0].get_xdata().tolist() == [1, 2, 3]


# --- bad input ----------------------------------------------------------------------------------

BAND = plotting.predictive_band
TASKS = plotting.accuracy_over_tasks
LOGITS, HOLE = PROBS - 3, torch.tensor([[0.9, 0.0], [math.nan, 0.8]])
REFUSED = [
    (lambda: BAND(X, X[1:], 0.1), r"mean has shape \(8,\); expected \(9,\)"),
    (lambda: BAND(X, X, X[1:]), r"scale has shape \(8,\)"),
    (lambda: BAND(X.expand(2, 9), X, 0.1), r"x has .* expected \(n,\) or \(n, 1\)"),
    (lambda: BAND(X[:0], X[:0], 0.1), "x is empty"),
    (lambda: BAND(X, X * math.nan, 0.1), "mean has 9 NaN entries"),
    (lambda: BAND(X, X, 0.1, train_data=(X, X[1:])), r"train_data\[1\] has shape \(8,\)"),
    (lambda: plotting.calibration_curve(LOGITS, TARGETS), r"logits\.softmax\(-1\)"),
    (lambda: plotting.entropy_ecdf(PROBS), r"entropy has shape \(50, 4\)"),
    (lambda: TASKS({"a": torch.rand(2, 3)}), r"expected \(runs, 3, 3\): after each"),
    (lambda: TASKS({"a": torch.rand(1, 2, 2, 2)}), r"'a'\] has shape \(1, 2, 2, 2\)"),
    (lambda: TASKS({"a": torch.rand(3)}), r"'a'\] has shape \(3,\)"),
    (lambda: TASKS({"a": HOLE * math.nan}), "is all NaN after the first"),
    (lambda: TASKS({"a": HOLE}), r"'a'\] has 1 NaN"),
    (lambda: TASKS({"a": [[1.0]]}), "expected a tensor"),
]


@pytest.mark.parametrize(("draw", "message"), REFUSED)
def test_bad_inputs_leave_no_figure(draw, message):
    with pytest.raises((TypeError, ValueError), match=message):
        draw()
    assert plt.get_fignums() == []
