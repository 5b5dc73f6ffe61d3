"""Contracts of `tyxe.plotting`: what is drawn, on which axes, under which labels."""

import math
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.oracles.tasks import ACCURACY
from tyxe import continual, metrics, plotting

matplotlib = pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")

X = torch.linspace(-1, 1, 9)
SCORES = torch.tensor([0.9, 0.8, 0.7, 0.4]), torch.tensor([0.5, 0.3])
FITTED = SimpleNamespace(
    loss=[9.0, 5.0, 4.0], log_likelihood=[-8.0, -3.0, -1.0], kl=[1.0, 2.0, 3.0]
)


@pytest.fixture(autouse=True)
def closed_figures() -> Iterator[None]:
    # doctests, which have no fixtures, may have left some open
    plt.close("all")
    yield
    plt.close("all")


def classified(num_points: int = 60, num_classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_points, num_classes, generator=generator)
    return logits.softmax(-1), torch.randint(num_classes, (num_points,), generator=generator)


def line(ax: "plt.Axes", label: str) -> "plt.Line2D":
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def legend_texts(ax: "plt.Axes") -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


DRAW = {
    "predictive_band": lambda ax=None: plotting.predictive_band(X, X, 0.1, ax),
    "calibration_curve": lambda ax=None: plotting.calibration_curve(*classified(), ax),
    "entropy_ecdf": lambda ax=None: plotting.entropy_ecdf(torch.rand(5), ax),
    "ood_histogram": lambda ax=None: plotting.ood_histogram(*SCORES, ax),
    "history": lambda ax=None: plotting.history(FITTED, ax),
    "risk_coverage": lambda ax=None: plotting.risk_coverage(*classified(), ax),
    "pit_histogram": lambda ax=None: plotting.pit_histogram(torch.rand(30), ax),
    "qq": lambda ax=None: plotting.qq(torch.rand(30), ax),
    "calibration_and_entropy": lambda: plotting.calibration_and_entropy(
        {"a": (*classified(), None)}
    ),
}
ON_AXES = [name for name in DRAW if name != "calibration_and_entropy"]


@pytest.mark.parametrize("name", ON_AXES)
def test_given_axes_are_drawn_on_and_a_figure_made_without(name: str) -> None:
    figure, ax = plt.subplots()
    assert DRAW[name](ax) is ax
    assert ax.has_data()
    assert plt.get_fignums() == [figure.number]
    own = DRAW[name]()
    assert plt.get_fignums() == [figure.number, own.figure.number]
    assert own.has_data()
    assert own.get_xlabel()
    assert own.get_ylabel()
    own.figure.canvas.draw()
    assert np.asarray(own.figure.canvas.buffer_rgba()).std() > 0


@pytest.mark.parametrize("name", DRAW)
def test_missing_matplotlib_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[plot\]"'):
        DRAW[name]()


class TestPredictiveBand:
    def test_bands_are_whole_scales_around_the_mean(self) -> None:
        mean, scale = X.sin(), 0.1 + X.square()
        ax = plotting.predictive_band(X, mean, scale, num_scales=2)
        # `orig=False`: what is drawn, an array. What was passed, matplotlib may keep as it was.
        heights = line(ax, "predictive mean").get_ydata(orig=False)
        torch.testing.assert_close(torch.tensor(heights).float(), mean)
        assert len(ax.collections) == 2
        for k, band in zip((2, 1), ax.collections, strict=True):
            outline = torch.as_tensor(band.get_paths()[0].vertices).float()
            for x, m, s in zip(X, mean, scale, strict=True):
                heights = outline[outline[:, 0] == x, 1]
                torch.testing.assert_close(heights.max(), m + k * s)
                torch.testing.assert_close(heights.min(), m - k * s)

    def test_inputs_may_be_unordered_columns(self) -> None:
        order = torch.randperm(len(X))
        columns = (v[order, None] for v in (X, X.sin(), X.exp()))
        shuffled = plotting.predictive_band(*columns, true_function=X.cos()[order])
        ordered = plotting.predictive_band(X, X.sin(), X.exp(), true_function=X.cos())
        for a, b in zip(shuffled.lines, ordered.lines, strict=True):
            np.testing.assert_array_equal(a.get_xydata(), b.get_xydata())

    def test_data_and_true_function(self) -> None:
        data = (torch.tensor([0.3, -0.5]), torch.tensor([1.0, 2.0]))
        ax = plotting.predictive_band(X, X, 0.1, train_data=data, true_function=2 * X, label="MF")
        assert legend_texts(ax) == ["MF", "true function", "data"]
        np.testing.assert_allclose(line(ax, "data").get_xydata(), torch.stack(data, -1).double())
        assert line(ax, "data").get_linestyle() == "None"
        np.testing.assert_allclose(line(ax, "true function").get_ydata(), 2 * X.double())

    def test_gradients_and_half_precision_are_no_obstacle(self) -> None:
        mean = X.bfloat16().requires_grad_()
        ax = plotting.predictive_band(X, mean, mean.exp())
        expected = plotting.predictive_band(X, mean.detach().float(), mean.detach().exp().float())
        assert ax.get_ylim() == pytest.approx(expected.get_ylim())

    @pytest.mark.parametrize("scale", [1, 0.5, torch.tensor(0.5), torch.full((9, 1), 0.5)])
    def test_scale_is_one_number_or_one_per_point(self, scale: Tensor | float) -> None:
        expected = plotting.predictive_band(
            X, X, torch.full((9,), float(torch.as_tensor(scale).max()))
        )
        drawn = plotting.predictive_band(X, X, scale)
        assert drawn.get_ylim() == pytest.approx(expected.get_ylim())


class TestCalibrationCurve:
    def test_points_are_the_metrics(self) -> None:
        probs, targets = classified()
        ax = plotting.calibration_curve(probs, targets, num_bins=5, min_count=1)
        ece = 100 * metrics.expected_calibration_error(probs, targets, num_bins=5)
        assert legend_texts(ax) == [f"ECE {ece:.1f} %"]
        curve = metrics.calibration_curve(probs, targets, num_bins=5)
        drawn = ax.lines[-1]
        np.testing.assert_allclose(drawn.get_xdata(), curve.confidence)
        np.testing.assert_allclose(drawn.get_ydata(), curve.accuracy)

    def test_curves_share_one_diagonal(self) -> None:
        ax = plotting.calibration_curve(*classified(), label="a")
        plotting.calibration_curve(*classified(seed=1), ax, label="b")
        assert len(ax.lines) == 3
        assert ax.lines[0].get_xydata().tolist() == [[0, 0], [1, 1]]
        assert ax.lines[1].get_color() != ax.lines[2].get_color()


class TestEntropyEcdf:
    def test_steps_count_the_points_below(self) -> None:
        entropy = torch.tensor([0.5, 0.1, 0.5, 1.0])
        drawn = plotting.entropy_ecdf(entropy, max_entropy=1.5).lines[0]
        assert drawn.get_drawstyle() == "steps-post"
        x, y = drawn.get_xdata(), drawn.get_ydata()
        np.testing.assert_allclose(x, [0, 0.1, 0.5, 0.5, 1.0, 1.5], rtol=1e-6)
        np.testing.assert_allclose(y, [0, 0.25, 0.5, 0.75, 1, 1])
        for h in (0.05, 0.3, 0.7, 1.2):
            assert y[np.searchsorted(x, h, side="right") - 1] == (entropy <= h).float().mean()

    def test_a_certain_net_jumps_to_one(self) -> None:
        drawn = plotting.entropy_ecdf(torch.zeros(3)).lines[0]
        assert drawn.get_ydata()[-1] == 1
        assert set(drawn.get_xdata(orig=False)) == {0}

    def test_style_and_label(self) -> None:
        ax = plotting.entropy_ecdf(torch.rand(4), label="OOD", linestyle="dashed", color="black")
        assert legend_texts(ax) == ["OOD"]
        assert (ax.lines[0].get_linestyle(), ax.lines[0].get_color()) == ("--", "black")
        assert ax.lines[0].get_marker() == "None"
        plain = plotting.entropy_ecdf(torch.rand(1_000), marker="s")
        assert (plain.lines[0].get_marker(), plain.lines[0].get_markevery()) == ("s", 0.15)
        assert plain.get_legend() is None


class TestOodHistogram:
    def test_fractions_over_shared_bins(self) -> None:
        ax = plotting.ood_histogram(*SCORES, num_bins=6)
        assert len(ax.patches) == 2
        for scores, patch in zip(SCORES, ax.patches, strict=True):
            heights, _ = np.histogram(scores, bins=6, range=(0.3, 0.9))
            drawn = sorted({*patch.get_xy()[:, 1].round(6)})
            assert drawn == sorted({0.0, *(heights / len(scores)).round(6)})
            edges = patch.get_xy()[:, 0]
            assert (edges.min(), edges.max()) == pytest.approx((0.3, 0.9))

    def test_legend(self) -> None:
        ax = plotting.ood_histogram(*SCORES, score="maximal probability")
        assert legend_texts(ax) == ["in-distribution", "out-of-distribution"]
        assert ax.get_legend().get_title().get_text() == "AUROC 0.875"
        assert ax.get_xlabel() == "maximal probability"
        ax = plotting.ood_histogram(torch.ones(3), torch.ones(2))
        assert ax.get_legend().get_title().get_text() == "AUROC 0.500"


def test_history_draws_three_curves_that_differ_without_colour() -> None:
    ax = plotting.history(FITTED)
    curves = {"loss": FITTED.loss, "negative log-likelihood": [8, 3, 1], "KL": FITTED.kl}
    for label, values in curves.items():
        assert list(line(ax, label).get_xdata()) == [1, 2, 3]
        assert list(line(ax, label).get_ydata()) == values
    assert len({drawn.get_linestyle() for drawn in ax.lines}) == 3


RESULTS = {
    "MAP": (*classified(), classified(40, seed=1)[0]),
    "MF": (*classified(seed=2), classified(30, seed=3)[0]),
    "HMC": (*classified(seed=4), None),
}


class TestCalibrationAndEntropy:
    def test_left_are_the_calibration_curves(self) -> None:
        left, _ = plotting.calibration_and_entropy(RESULTS, num_bins=6, min_count=1).axes
        assert len(left.lines) == 1 + len(RESULTS)
        for drawn, (name, (probs, targets, _)) in zip(left.lines[1:], RESULTS.items(), strict=True):
            curve = metrics.calibration_curve(probs, targets, num_bins=6)
            np.testing.assert_allclose(drawn.get_ydata(), curve.accuracy)
            ece = metrics.expected_calibration_error(probs, targets, num_bins=6)
            assert drawn.get_label() == f"{name} (ECE {100 * ece:.1f} %)"

    def test_right_are_test_solid_and_ood_dashed(self) -> None:
        left, right = plotting.calibration_and_entropy(RESULTS).axes
        drawn = [entry for entry in right.lines if len(entry.get_xdata())]
        expected = [
            (p, style, curve.get_color())
            for (probs, _, ood), curve in zip(RESULTS.values(), left.lines[1:], strict=True)
            for p, style in ((probs, "-"), (ood, "--"))
            if p is not None
        ]
        for entry, (p, style, color) in zip(drawn, expected, strict=True):
            entropies = metrics.predictive_entropy(p).sort().values
            np.testing.assert_allclose(entry.get_xdata()[1:-1], entropies)
            assert entry.get_xdata()[-1] == pytest.approx(math.log(4))
            assert (entry.get_linestyle(), entry.get_color()) == (style, color)

    def test_legends_name_methods_once_and_cover_no_axes(self) -> None:
        figure = plotting.calibration_and_entropy(RESULTS)
        left, right = figure.axes
        (methods,) = figure.legends
        names = [text.get_text().split(" (ECE")[0] for text in methods.get_texts()]
        assert names == list(RESULTS)
        assert left.get_legend() is None
        assert legend_texts(right) == ["test", "out-of-distribution"]
        figure.canvas.draw()
        for legend in (methods, right.get_legend()):
            box = legend.get_window_extent()
            # the anchors touch: one pixel of rounding
            assert not any(
                box.y0 + 1 < ax.bbox.y1 and ax.bbox.y0 < box.y1 - 1 for ax in figure.axes
            )


def test_risk_coverage_is_the_curve():
    probs, targets = classified()
    ax = plotting.risk_coverage(probs, targets, label="MAP")
    curve = metrics.risk_coverage_curve(probs, targets)
    np.testing.assert_allclose(ax.lines[-1].get_ydata(), curve.risk)
    assert ax.lines[-1].get_label() == f"MAP (AURC {metrics.aurc(probs, targets):.3f})"


def test_quantiles_of_calibrated_predictions_lie_on_the_diagonal():
    y = torch.randn(2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ax = plotting.qq(metrics.gaussian_pit(0 * y, 2.0, y), label="wide")
    expected, found = ax.lines[-1].get_data()
    assert np.polyfit(expected, found, 1)[0] == pytest.approx(0.5, abs=0.02)
    assert len(plotting.qq(torch.tensor([0.0, 0.5, 1.0])).lines[-1].get_xdata()) == 1
    assert legend_texts(ax) == ["wide"]


def test_calibration_curve_leaves_sparse_bins_out():
    probs = torch.tensor([[0.9, 0.1]] * 5 + [[0.6, 0.4]])
    targets = torch.zeros(6, dtype=torch.long)
    ax = plotting.calibration_curve(probs, targets, min_count=2)
    assert len(ax.lines[-1].get_xdata()) == 1
    assert ax.lines[-1].get_xdata()[0] == pytest.approx(0.9)
    every = plotting.calibration_curve(probs, targets, min_count=1)
    assert len(every.lines[-1].get_xdata()) == 2
    by_default = plotting.calibration_curve(probs, targets)
    assert len(by_default.lines[-1].get_xdata()) == 1
    # The error is that of all bins.
    assert every.lines[-1].get_label() == ax.lines[-1].get_label()


def test_bars_of_calibration_curves_are_wilsons():
    probs = torch.tensor([[0.9, 0.1]] * 40)
    targets = torch.tensor([0] * 30 + [1] * 10)
    bars, shades = plotting.calibration_curve(probs, targets).collections
    expected = stats.binomtest(30, 40).proportion_ci(0.95, "wilson")
    ((_, low), (_, high)) = bars.get_segments()[0]
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert shades.get_sizes().tolist() == [800]


@pytest.mark.parametrize("seed", range(3))
def test_calibrated_points_lie_in_the_bands(seed):
    draw = torch.Generator().manual_seed(seed)
    pit = torch.rand(4_000, dtype=torch.float64, generator=draw)
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


def test_a_second_call_cuts_nothing():
    few, many = torch.rand(20), 5 * torch.rand(20)
    ax = plotting.entropy_ecdf(few)
    plotting.entropy_ecdf(many, ax)
    assert ax.get_xlim()[0] == 0
    assert ax.get_xlim()[1] >= many.max()
    right, wrong = classified(), classified(seed=1)
    ax = plotting.risk_coverage(right[0], right[0].argmax(-1))
    plotting.risk_coverage(wrong[0], wrong[1], ax)
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] >= ax.lines[-1].get_ydata().max()


def test_first_epochs_do_not_flatten_the_others():
    loss = [1e4, 5e3, 1e3, *(10 - epoch / 10 for epoch in range(40))]
    fitted = SimpleNamespace(loss=loss, log_likelihood=[-v for v in loss], kl=[1.0] * 43)
    ax = plotting.history(fitted)
    assert ax.get_ylim()[1] < 20
    (inset,) = ax.child_axes
    assert inset.get_ylim()[1] > 1e4
    calm = SimpleNamespace(loss=loss[3:], log_likelihood=[-v for v in loss[3:]], kl=[1.0] * 40)
    assert plotting.history(calm).child_axes == []


# --- accuracy over tasks ------------------------------------------------------------------------


def test_accuracies_have_means_and_two_standard_errors():
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


def test_accuracies_are_of_the_tasks_that_all_runs_have_finished():
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


# --- bad input ----------------------------------------------------------------------------------

BAND, METHODS = plotting.predictive_band, plotting.calibration_and_entropy
TASKS, (PROBS, TARGETS, OOD) = plotting.accuracy_over_tasks, RESULTS["MAP"]
LOGITS, HOLE = PROBS - 3, torch.tensor([[0.9, 0.0], [math.nan, 0.8]])


def band_of(x: Tensor, mean: Tensor, scale: float, data: tuple[Tensor, Tensor]) -> Any:
    return BAND(x, mean, scale, train_data=data)


@pytest.mark.parametrize(
    ("draw", "inputs", "kind", "message"),
    [
        (BAND, (X, X[1:], 0.1), ValueError, r"mean has shape \(8,\); expected \(9,\)"),
        (BAND, (X, X, X[1:]), ValueError, r"scale has shape \(8,\)"),
        (BAND, (X.expand(2, 9), X, 0.1), ValueError, r"x has .* expected \(n,\) or \(n, 1\)"),
        (BAND, (X[:0], X[:0], 0.1), ValueError, "x is empty"),
        (BAND, (X, X * math.nan, 0.1), ValueError, "mean has 9 NaN entries"),
        (band_of, (X, X, 0.1, (X, X[1:])), ValueError, r"train_data\[1\] has shape \(8,\)"),
        (plotting.calibration_curve, (LOGITS, TARGETS), ValueError, r"logits\.softmax\(-1\)"),
        (plotting.entropy_ecdf, (PROBS,), ValueError, r"entropy has shape \(60, 4\)"),
        (METHODS, ({},), ValueError, "results is empty; expected at least one method"),
        (METHODS, ({"a": RESULTS["MF"], "b": (LOGITS, TARGETS, OOD)},), ValueError, "that sum"),
        (METHODS, ({"a": RESULTS["MF"], "b": (PROBS, TARGETS, LOGITS)},), ValueError, "that sum"),
        (TASKS, ({},), ValueError, "at least one method"),
        (TASKS, ({"a": torch.rand(2, 3)},), ValueError, r"expected \(runs, 3, 3\): after each"),
        (TASKS, ({"a": torch.rand(1, 2, 2, 2)},), ValueError, r"'a'\] has shape \(1, 2, 2, 2\)"),
        (TASKS, ({"a": torch.rand(3)},), ValueError, r"'a'\] has shape \(3,\)"),
        (
            TASKS,
            ({"a": torch.full((2, 2), math.nan)},),
            ValueError,
            "is all NaN after the first",
        ),
        (TASKS, ({"a": HOLE},), ValueError, r"'a'\] has 1 NaN"),
        (TASKS, ({"a": [[1.0]]},), TypeError, "expected a tensor"),
    ],
)
def test_bad_inputs_leave_no_figure(
    draw: Callable[..., Any], inputs: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        draw(*inputs)
    assert plt.get_fignums() == []
