"""Predictions of numbers, and the place of targets in them."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tyxe.plotting.axes import PALETTE, axes, flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
