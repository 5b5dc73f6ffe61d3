"""Calibration, predictive entropy, scores and abstention of classifiers."""

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
    marker: str | None = None,
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
        marker: matplotlib's name of a marker for a few of the points; None draws none.
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
        marker=marker,
        markersize=4.5,
        markevery=0.15,  # of the panel's diagonal, so that curves of many points are as clear
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
