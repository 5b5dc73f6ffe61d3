"""Predictions: calibration, entropy and abstention of classifiers; numbers and their targets."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tyxe import metrics
from tyxe.plotting.axes import PALETTE, axes, flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def calibration_curve(
    probs: Tensor,
    targets: Tensor,
    ax: "Axes | None" = None,
    *,
    label: str = "",
    num_bins: int = 15,
    min_count: int = 5,
    color: str | None = None,
    marker: str = "o",
    weights: Tensor | None = None,
) -> "Axes":
    r"""Draw accuracy against confidence with the diagonal, and the ECE in the label.

    The points are those of `tyxe.metrics.calibration_curve`; below the diagonal a net is
    overconfident. Bars are Wilson's 95 % intervals of each bin's accuracy, and the shaded area
    around a point is proportional to the bin's number of points. Several calls on the same axes
    share one diagonal.

    Args:
        label: name of the method; the legend says `label (ECE 1.2 %)`.
        num_bins: number of equal-width bins of the maximal probability.
        min_count: bins with fewer points are left out of the curve (not of the ECE), because
            their accuracy is too uncertain.
        color: colour of the curve; None uses the next colour of the axes.
        marker: matplotlib's name of the marker.
        weights: how often each point counts, `(n,)`.

    References:
        Guo et al. (2017), On calibration of modern neural networks, figure 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> ax = calibration_curve(probs, torch.tensor([0, 0, 1, 1]), label="MAP")
        >>> ax.lines[-1].get_label()
        'MAP (ECE 25.0 %)'
    """
    curve = metrics.calibration_curve(probs, targets, num_bins, weights=weights)
    error = metrics.expected_calibration_error(probs, targets, num_bins, weights)
    ece = f"ECE {100 * error:.1f} %"
    ax = axes(ax)
    if not any(line.get_gid() == "diagonal" for line in ax.lines):
        ax.plot([0, 1], [0, 1], gid="diagonal", color="0.6", linestyle="dashed", linewidth=1)
    full = (curve.counts >= min_count).tolist()
    confidence = flat("confidence", curve.confidence)[full]
    accuracy = flat("accuracy", curve.accuracy)[full]
    counts = flat("counts", curve.counts.double())[full]
    said = f"{label} ({ece})" if label else ece
    look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.5, "label": said}
    (drawn,) = ax.plot(confidence, accuracy, **look)
    own: Any = drawn.get_color()
    ax.vlines(confidence, *wilson_interval(accuracy, counts), color=own, linewidth=1)
    shares = counts / curve.counts.sum().cpu()
    ax.scatter(confidence, accuracy, 800 * shares, color=own, alpha=0.15, linewidth=0)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(-0.02, 1.02))
    ax.legend(frameon=False)
    return ax


def wilson_interval(share: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of Wilson's interval of 95 % for shares of so many points, `(n,)`.

    Reference:
        Wilson (1927), Probable inference, the law of succession, and statistical inference.
    """
    z2 = 1.96**2
    middle = (share + z2 / (2 * counts)) / (1 + z2 / counts)
    spread = share * (1 - share) / counts + z2 / (4 * counts.square())
    half = spread.sqrt() * math.sqrt(z2) / (1 + z2 / counts)
    return middle - half, middle + half


def entropy_ecdf(
    entropy: Tensor,
    ax: "Axes | None" = None,
    *,
    label: str | None = None,
    linestyle: str = "solid",
    color: str | None = None,
    max_entropy: float | None = None,
) -> "Axes":
    r"""Draw the empirical distribution function of predictive entropies.

    `F(h) = 1/n sum_i 1[h_i <= h]`. By convention lines are solid for test points and dashed for
    out-of-distribution points. The further right a dashed curve, the better the detection.

    Args:
        entropy: entropies in nats, shape `(n,)`, from `tyxe.metrics.predictive_entropy`.
        label: entry in the legend, if any.
        linestyle: matplotlib's name of the line style.
        color: colour of the line; None uses the next colour of the axes.
        max_entropy: where the line ends, in nats, such as `log C`; None ends it at the largest.

    Example:
        >>> ax = entropy_ecdf(torch.tensor([0.2, 0.1]), label="test")
        >>> ax.lines[0].get_ydata().tolist()
        [0.0, 0.5, 1.0, 1.0]
    """
    steps = flat("entropy", entropy).sort().values
    start = steps[:1].clamp(max=0)
    end = steps[-1:] if max_entropy is None else steps[-1:].clamp(min=max_entropy)
    heights = torch.arange(len(steps) + 1, device="cpu") / len(steps)
    ax = axes(ax)
    ax.plot(
        torch.cat([start, steps, end]),
        torch.cat([heights, heights[-1:]]),
        drawstyle="steps-post",
        color=color,
        linestyle=linestyle,
        label=label,
    )
    ax.set(xlabel="predictive entropy (nats)", ylabel="fraction of points", ylim=(-0.02, 1.02))
    ax.set_xlim(left=0, auto=None)  # the other end follows later calls
    if label is not None:
        ax.legend(frameon=False)
    return ax


def ood_histogram(
    in_scores: Tensor,
    out_scores: Tensor,
    ax: "Axes | None" = None,
    *,
    num_bins: int = 30,
    score: str = "score (higher: more in-distribution)",
) -> "Axes":
    r"""Draw histograms of both sets' scores over the same bins, with the AUROC in the legend.

    Args:
        in_scores: scores of the in-distribution points, shape `(n,)`; higher is "more in".
        out_scores: scores of the out-of-distribution points, shape `(m,)`.
        num_bins: number of equal-width bins from the smallest to the largest score.
        score: label of the horizontal axis.

    Example:
        >>> ax = ood_histogram(torch.tensor([0.9, 0.8]), torch.tensor([0.5, 0.6]))
        >>> ax.get_legend().get_title().get_text()
        'AUROC 1.000'
    """
    auroc = metrics.ood_auroc(in_scores, out_scores)
    pair = flat("in_scores", in_scores), flat("out_scores", out_scores)
    both = torch.cat(pair)
    ax = axes(ax)
    looks = (("in-distribution", "solid"), ("out-of-distribution", "dashed"))
    for scores, (label, linestyle), color in zip(pair, looks, PALETTE, strict=False):
        ax.hist(
            scores,
            bins=num_bins,
            range=(both.min().item(), both.max().item()),
            weights=torch.full_like(scores, 1 / len(scores)),
            histtype="stepfilled",
            # transparency within the colour (hexadecimal), so that the outline stays opaque
            facecolor=f"{color}59",
            edgecolor=color,
            linestyle=linestyle,
            linewidth=1.3,
            label=label,
        )
    ax.set(xlabel=score, ylabel="fraction of points")
    ax.legend(frameon=False, title=f"AUROC {auroc:.3f}", alignment="left")
    return ax


def risk_coverage(
    probs: Tensor, targets: Tensor, ax: "Axes | None" = None, *, label: str = ""
) -> "Axes":
    """Draw the error of the kept points against their share, with the AURC in the label.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> risk_coverage(probs, torch.tensor([0, 1])).lines[-1].get_label()
        'AURC 0.250'
    """
    curve, area = metrics.risk_coverage_curve(probs, targets), metrics.aurc(probs, targets)
    ax = axes(ax)
    said = f"{label} (AURC {area:.3f})" if label else f"AURC {area:.3f}"
    ax.step(flat("coverage", curve.coverage), flat("risk", curve.risk), where="post", label=said)
    ax.set(xlabel="coverage", ylabel="error", xlim=(0, 1.02))
    ax.set_ylim(bottom=0, auto=None)  # the other end follows later calls
    ax.legend(frameon=False)
    return ax


def predictive_band(
    x: Tensor,
    mean: Tensor,
    scale: Tensor | float,
    ax: "Axes | None" = None,
    *,
    num_scales: int = 3,
    train_data: tuple[Tensor, Tensor] | None = None,
    true_function: Tensor | None = None,
    color: str = PALETTE[0],
    label: str = "predictive mean",
) -> "Axes":
    r"""Draw a one-dimensional regression's mean and its bands of standard deviations.

    Bands `mu(x) +- k sigma(x)`, `k = 1..num_scales`, overlap, so the inner ones are darkest.

    Args:
        x: inputs, shape `(n,)` or `(n, 1)`, in any order.
        mean: predictive means, as many as inputs.
        scale: predictive standard deviations, as many as inputs, or one number.
        num_scales: number of bands.
        train_data: inputs and targets to draw as points, each `(m,)` or `(m, 1)`.
        true_function: the function's values at `x`, drawn dashed.
        color: colour of the mean and its bands.
        label: the mean's entry in the legend.

    Example:
        >>> x = torch.linspace(-1, 1, 50)
        >>> ax = predictive_band(x, x.sin(), 0.1, true_function=x.sin())
        >>> len(ax.collections)
        3
    """
    x, order = flat("x", x).sort()
    mean = flat("mean", mean, x)[order]
    scale = scale if isinstance(scale, Tensor) else torch.tensor(float(scale), device="cpu")
    sigma = flat("scale", scale.expand(len(x)) if scale.dim() == 0 else scale, x)[order]
    values = None if true_function is None else flat("true_function", true_function, x)[order]
    points = []
    if train_data is not None:
        inputs = flat("train_data[0]", train_data[0])
        points = [inputs, flat("train_data[1]", train_data[1], inputs)]
    ax = axes(ax)
    for k in range(num_scales, 0, -1):
        lower, upper = mean - k * sigma, mean + k * sigma
        ax.fill_between(x, lower, upper, color=color, alpha=0.18, linewidth=0, zorder=2)
    ax.plot(x, mean, color=color, label=label, zorder=4)
    if values is not None:
        ax.plot(x, values, color="0.25", linestyle="dashed", label="true function", zorder=3)
    if points:
        ax.plot(*points, "o", color="black", markersize=3.5, label="data", zorder=5)
    ax.set(xlabel="x", ylabel="y")
    # the bands fill the axes, and the legend has to be readable on top of them
    ax.legend(framealpha=0.8, edgecolor="none", fontsize="small")
    return ax


def pit_histogram(
    pit: Tensor,
    ax: "Axes | None" = None,
    *,
    num_bins: int = 10,
    label: str = "",
    weights: Tensor | None = None,
) -> "Axes":
    """Draw the density of what `tyxe.metrics.gaussian_pit` returns; flat if it is calibrated.

    A valley means that predictions are too certain, a hill that they are too uncertain. The grey
    band holds 95 % of the bins of as many calibrated points. `weights` say how often each counts.

    Example:
        >>> len(pit_histogram(torch.rand(50), num_bins=5).patches)
        1
    """
    known = ~pit.isnan()
    values = flat("pit", pit[known])
    mass = values.new_ones(len(values))
    if weights is not None:
        mass = flat("weights", weights[known], values)
    ax = axes(ax)
    how: dict[str, Any] = {"density": True, "histtype": "stepfilled", "alpha": 0.4, "label": label}
    ax.hist(values.numpy(), bins=num_bins, range=(0, 1), weights=mass.numpy(), **how)
    ax.axhline(1, color="0.6", linestyle="dashed", linewidth=1)
    half = 1.96 * math.sqrt((num_bins - 1) / float(mass.sum()))
    ax.fill_between([0, 1], max(1 - half, 0), 1 + half, color="0.5", alpha=0.2, linewidth=0)
    ax.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
    if label:
        ax.legend(frameon=False)
    return ax


def qq(pit: Tensor, ax: "Axes | None" = None, *, label: str = "") -> "Axes":
    """Draw quantiles of targets, standardised by their predictions, against a normal's.

    A slope steeper than the diagonal means that predictions are too certain. Points outside of all
    samples or digits are left out. The grey band holds 95 % of the quantiles of as many calibrated
    points.

    Example:
        >>> len(qq(torch.rand(50)).lines)
        2
    """
    values = flat("pit", pit[~pit.isnan()]).sort().values
    ranks = torch.arange(1, len(values) + 1, dtype=torch.float64, device="cpu")
    levels = (ranks - 0.5) / len(values)
    found, expected = torch.special.ndtri(values), torch.special.ndtri(levels)
    inside = found.isfinite()
    ax = axes(ax)
    low, high = float(expected[0]), float(expected[-1])
    ax.plot([low, high], [low, high], color="0.6", linestyle="dashed", linewidth=1)
    # Of a quantile of n points, to first order [Serfling 1980, 2.3.3].
    density = (-expected.square() / 2).exp() / math.sqrt(2 * math.pi)
    half = 1.96 * (levels * (1 - levels) / len(values)).sqrt() / density
    band: dict[str, Any] = {"color": "0.5", "alpha": 0.2, "linewidth": 0}
    ax.fill_between(expected, expected - half, expected + half, **band)
    ax.plot(expected[inside], found[inside], "o", markersize=3, label=label)
    ax.set(xlabel="quantile of a normal", ylabel="quantile of the standardised targets")
    if label:
        ax.legend(frameon=False)
    return ax
