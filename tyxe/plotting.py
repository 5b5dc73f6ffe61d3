"""Figures of predictions: bands, calibration, predictive entropy, scores and training curves.

Needs the optional extra `plot` (matplotlib). Every function but `calibration_and_entropy` draws on
`ax`, or on a new figure's axes when it is None, and returns the axes; none shows or saves anything.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tyxe import metrics
from tyxe.metrics.checks import check_real

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PALETTE",
    "HistoryLike",
    "calibration_and_entropy",
    "calibration_curve",
    "entropy_ecdf",
    "history",
    "ood_histogram",
    "predictive_band",
]

# Okabe and Ito (2008) without its yellow, which vanishes on white, then three of Paul Tol's
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


class HistoryLike(Protocol):
    """What `history` draws: one number an epoch, in nats, such as `fit` returns."""

    @property
    def loss(self) -> Sequence[float]:
        """The objective, `beta * kl - log_likelihood`."""

    @property
    def log_likelihood(self) -> Sequence[float]:
        """Expected log-likelihood of the whole set."""

    @property
    def kl(self) -> Sequence[float]:
        """KL divergence from the prior."""


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

    Bands `mu(x) +- k sigma(x)`, `k = 1..num_scales`, one over the other, so darkest inside.

    Args:
        x: inputs, shape `(n,)` or `(n, 1)`, in any order.
        mean: predictive means, as many as inputs.
        scale: predictive standard deviations, as many as inputs, or one number.
        ax: axes to draw on; None makes a figure.
        num_scales: number of bands.
        train_data: inputs and targets to draw as points, each `(m,)` or `(m, 1)`.
        true_function: the function's values at `x`, drawn dashed.
        color: colour of the mean and its bands.
        label: the mean's entry in the legend.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: for inputs that are not floating-point tensors.
        ValueError: if lengths do not match, or inputs are empty or NaN.

    Example:
        >>> x = torch.linspace(-1, 1, 50)
        >>> ax = predictive_band(x, x.sin(), 0.1, true_function=x.sin())
        >>> len(ax.collections)
        3
    """
    x, order = _flat("x", x).sort()
    mean = _flat("mean", mean, x)[order]
    sigma = _flat("scale", _per_point(scale, len(x)), x)[order]
    values = None if true_function is None else _flat("true_function", true_function, x)[order]
    points = None if train_data is None else _points(*train_data)
    ax = _axes(ax)
    for k in range(num_scales, 0, -1):
        lower, upper = mean - k * sigma, mean + k * sigma
        ax.fill_between(x, lower, upper, color=color, alpha=0.18, linewidth=0, zorder=2)
    ax.plot(x, mean, color=color, label=label, zorder=4)
    if values is not None:
        ax.plot(x, values, color="0.25", linestyle="dashed", label="true function", zorder=3)
    if points is not None:
        ax.plot(*points, "o", color="black", markersize=3.5, label="data", zorder=5)
    ax.set(xlabel="x", ylabel="y")
    # the bands fill the axes: the legend has to be readable on top of them
    ax.legend(framealpha=0.8, edgecolor="none", fontsize="small")
    return ax


def calibration_curve(
    probs: Tensor,
    targets: Tensor,
    ax: "Axes | None" = None,
    *,
    label: str = "",
    num_bins: int = 15,
    min_count: int = 1,
    color: str | None = None,
    marker: str = "o",
) -> "Axes":
    r"""Draw accuracy against confidence with the diagonal, and the ECE in the label.

    The points are those of `tyxe.metrics.calibration_curve`; below the diagonal a net is
    overconfident. Several calls on the same axes share one diagonal.

    Args:
        probs: class probabilities, shape `(n, C)`.
        targets: classes in `0..C-1`, shape `(n,)`.
        ax: axes to draw on; None makes a figure.
        label: name of the method; the legend says `label (ECE 1.2 %)`.
        num_bins: number of equal-width bins of the maximal probability.
        min_count: bins with fewer points are left out of the curve (not of the ECE): the
            accuracy of two points says nothing.
        color: colour of the curve; None takes the axes' next.
        marker: matplotlib's name of the marker.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError, ValueError: as in `tyxe.metrics.calibration_curve`.

    References:
        Guo et al. (2017), On calibration of modern neural networks, figure 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25]]).expand(4, 2)
        >>> ax = calibration_curve(probs, torch.tensor([0, 0, 1, 1]), label="MAP")
        >>> ax.lines[-1].get_label()
        'MAP (ECE 25.0 %)'
    """
    curve = metrics.calibration_curve(probs, targets, num_bins)
    ece = f"ECE {100 * metrics.expected_calibration_error(probs, targets, num_bins):.1f} %"
    ax = _axes(ax)
    if not any(line.get_gid() == "diagonal" for line in ax.lines):
        ax.plot([0, 1], [0, 1], gid="diagonal", color="0.6", linestyle="dashed", linewidth=1)
    full = curve.counts >= min_count
    ax.plot(
        _flat("confidence", curve.confidence)[full.tolist()],
        _flat("accuracy", curve.accuracy)[full.tolist()],
        color=color,
        marker=marker,
        markersize=4.5,
        label=f"{label} ({ece})" if label else ece,
    )
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1.02), ylim=(-0.02, 1.02))
    ax.legend(frameon=False)
    return ax


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

    `F(h) = 1/n sum_i 1[h_i <= h]`. By convention solid for test and dashed for
    out-of-distribution points: the further right a dashed curve, the better it is told apart.

    Args:
        entropy: entropies in nats, shape `(n,)`, from `tyxe.metrics.predictive_entropy`.
        ax: axes to draw on; None makes a figure.
        label: entry in the legend, if any.
        linestyle: matplotlib's name of the line style.
        color: colour of the line; None takes the axes' next.
        max_entropy: where the line ends, in nats, such as `log C`; None ends it at the largest.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError: if `entropy` is no floating-point tensor.
        ValueError: if `entropy` is not `(n,)`, is empty or NaN.

    Example:
        >>> ax = entropy_ecdf(torch.tensor([0.2, 0.1]), label="test")
        >>> ax.lines[0].get_ydata().tolist()
        [0.0, 0.5, 1.0, 1.0]
    """
    steps = _flat("entropy", entropy).sort().values
    start = steps[:1].clamp(max=0)
    end = steps[-1:] if max_entropy is None else steps[-1:].clamp(min=max_entropy)
    heights = torch.arange(len(steps) + 1) / len(steps)
    ax = _axes(ax)
    ax.plot(
        torch.cat([start, steps, end]),
        torch.cat([heights, heights[-1:]]),
        drawstyle="steps-post",
        color=color,
        linestyle=linestyle,
        label=label,
    )
    ax.set(xlabel="predictive entropy (nats)", ylabel="fraction of points", ylim=(-0.02, 1.02))
    ax.set_xlim(left=0)
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
        ax: axes to draw on; None makes a figure.
        num_bins: number of equal-width bins from the smallest to the largest score.
        score: label of the horizontal axis.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError, ValueError: as in `tyxe.metrics.ood_auroc`.

    Example:
        >>> ax = ood_histogram(torch.tensor([0.9, 0.8]), torch.tensor([0.5, 0.6]))
        >>> ax.get_legend().get_title().get_text()
        'AUROC 1.000'
    """
    auroc = metrics.ood_auroc(in_scores, out_scores)
    pair = _flat("in_scores", in_scores), _flat("out_scores", out_scores)
    both = torch.cat(pair)
    ax = _axes(ax)
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


def calibration_and_entropy(
    results: Mapping[str, tuple[Tensor, Tensor, Tensor | None]],
    *,
    num_bins: int = 15,
    min_count: int = 1,
) -> "Figure":
    r"""Draw methods side by side: calibration, and entropy on test and unfamiliar data.

    Left `calibration_curve` of each method; right `entropy_ecdf`, solid on the test set, dashed
    out of distribution. One colour and marker per method, shared by both panels.

    Args:
        results: for each method's name `(probs, targets, ood_probs)`: class probabilities of the
            test set `(n, C)`, its targets `(n,)`, and the probabilities of out-of-distribution
            points `(m, C)`, or None to leave them out.
        num_bins: number of equal-width bins of the maximal probability.
        min_count: as in `calibration_curve`.

    Returns:
        The figure, of two axes.

    Raises:
        ImportError: if matplotlib is missing.
        TypeError, ValueError: as in `tyxe.metrics.calibration_curve`; also without results.

    References:
        Ritter and Karaletsos (2022), TyXe: Pyro-based Bayesian neural nets for PyTorch.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> fig = calibration_and_entropy({"MAP": (probs, torch.tensor([0, 1]), 1 - probs)})
        >>> [ax.get_xlabel() for ax in fig.axes]
        ['confidence', 'predictive entropy (nats)']
    """
    if not results:
        raise ValueError(
            "`results` is empty, expected at least one method: "
            'pass {"name": (probs, targets, ood_probs)}'
        )
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 4.2), layout="constrained")
    try:
        _draw_methods(results, left, right, {"num_bins": num_bins, "min_count": min_count})
    except Exception:
        plt.close(figure)
        raise
    _outside_legends(figure, left, right)
    return figure


def history(history: HistoryLike, ax: "Axes | None" = None) -> "Axes":
    r"""Draw the training curves of a fit: loss, negative log-likelihood and KL.

    `loss = beta * kl - log_likelihood`: the log-likelihood is drawn with its sign turned, so that
    the other two add up to the loss at `beta = 1`.

    Args:
        history: what `fit` returned, or anything with its three lists of one number an epoch.
        ax: axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.

    Example:
        >>> from types import SimpleNamespace
        >>> fitted = SimpleNamespace(loss=[9.0, 5.0], log_likelihood=[-8.0, -3.0], kl=[1.0, 2.0])
        >>> ax = history(fitted)
        >>> [line.get_label() for line in ax.lines]
        ['loss', 'negative log-likelihood', 'KL']
    """
    ax = _axes(ax)
    curves = {
        "loss": history.loss,
        "negative log-likelihood": [-value for value in history.log_likelihood],
        "KL": history.kl,
    }
    for (label, values), color, linestyle in zip(
        curves.items(), PALETTE, ("solid", "dashed", "dashdot"), strict=False
    ):
        epochs = range(1, len(values) + 1)
        ax.plot(epochs, values, color=color, linestyle=linestyle, label=label)
    ax.set(xlabel="epoch", ylabel="nats")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)
    return ax


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "tyxe.plotting needs matplotlib, which is not installed: "
            'install the optional extra with pip install -e ".[plot]"'
        ) from error
    return plt


def _axes(ax: "Axes | None") -> "Axes":
    """The given axes as they are, or those of a new figure."""
    if ax is not None:
        return ax
    ax = _pyplot().subplots(figsize=(5, 3.6), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_prop_cycle(color=PALETTE)
    return ax


def _draw_methods(
    results: Mapping[str, tuple[Tensor, Tensor, Tensor | None]],
    left: "Axes",
    right: "Axes",
    bins: dict[str, int],
) -> None:
    for i, (name, (probs, targets, ood_probs)) in enumerate(results.items()):
        color, marker = PALETTE[i % len(PALETTE)], _MARKERS[i % len(_MARKERS)]
        calibration_curve(probs, targets, left, label=name, color=color, marker=marker, **bins)
        for p, linestyle in ((probs, "solid"), (ood_probs, "dashed")):
            if p is not None:
                entropy, limit = metrics.predictive_entropy(p), math.log(p.shape[-1])
                entropy_ecdf(entropy, right, linestyle=linestyle, color=color, max_entropy=limit)


def _outside_legends(figure: "Figure", left: "Axes", right: "Axes") -> None:
    """Methods below both panels and line styles above the right one, clear of every curve."""
    handles, labels = left.get_legend_handles_labels()
    left.legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for label, linestyle in (("test", "solid"), ("out-of-distribution", "dashed")):
        right.plot([], [], color="0.3", linestyle=linestyle, label=label)
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)


def _points(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    inputs = _flat("train_data[0]", inputs)
    return inputs, _flat("train_data[1]", targets, inputs)


def _per_point(value: Tensor | float, num_points: int) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value))
    return value if value.dim() > 0 else value.expand(num_points)


def _flat(name: str, value: Tensor, like: Tensor | None = None) -> Tensor:
    """A column or vector as a float64 vector on the CPU, of the length of `like`."""
    vector = check_real(name, value).detach().cpu().double()
    if vector.dim() == 2 and vector.shape[1] == 1:
        vector = vector.squeeze(1)
    if vector.dim() != 1:
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, expected (n,) or (n, 1): "
            f"pass one number per point, such as {name}[:, 0]"
        )
    if like is not None and len(vector) != len(like):
        raise ValueError(
            f"`{name}` has {len(vector)} points, expected {len(like)}: pass {name} of the points "
            "it is drawn against"
        )
    return vector
