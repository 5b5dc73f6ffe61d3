"""Risk against coverage, and where targets lie in their predictive distributions."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tyxe import metrics
from tyxe.plotting.axes import axes, flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def risk_coverage(
    probs: Tensor, targets: Tensor, ax: "Axes | None" = None, *, label: str = ""
) -> "Axes":
    """Draw the error of the points that are kept, by their share, and the AURC in the label.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> risk_coverage(probs, torch.tensor([0, 1])).lines[-1].get_label()
        'AURC 0.250'
    """
    curve, area = metrics.risk_coverage_curve(probs, targets), metrics.aurc(probs, targets)
    ax = axes(ax)
    said = f"{label} (AURC {area:.3f})" if label else f"AURC {area:.3f}"
    ax.step(flat("coverage", curve.coverage), flat("risk", curve.risk), where="post", label=said)
    ax.set(xlabel="coverage", ylabel="error", xlim=(0, 1.02), ylim=(0, None))
    ax.legend(frameon=False)
    return ax


def pit_histogram(
    pit: Tensor, ax: "Axes | None" = None, *, num_bins: int = 10, label: str = ""
) -> "Axes":
    """Draw the density of what `tyxe.metrics.gaussian_pit` returns; flat if it is calibrated.

    A valley is of predictions that are too certain, a hill of too uncertain ones.

    Example:
        >>> len(pit_histogram(torch.rand(50), num_bins=5).patches)
        1
    """
    values = flat("pit", pit.reshape(-1))
    ax = axes(ax)
    how: dict[str, Any] = {"density": True, "histtype": "stepfilled", "alpha": 0.4, "label": label}
    ax.hist(values.numpy(), bins=num_bins, range=(0, 1), **how)
    ax.axhline(1, color="0.6", linestyle="dashed", linewidth=1)
    ax.set(xlabel="probability integral transform", ylabel="density", xlim=(0, 1))
    if label:
        ax.legend(frameon=False)
    return ax


def qq(pit: Tensor, ax: "Axes | None" = None, *, label: str = "") -> "Axes":
    """Draw quantiles of targets, standardised by their predictions, against a normal's.

    Steeper than the diagonal are predictions that are too certain. What lies outside of all samples
    or digits is left out.

    Example:
        >>> len(qq(torch.rand(50)).lines)
        2
    """
    values = flat("pit", pit.reshape(-1)).sort().values
    levels = (torch.arange(1, len(values) + 1, dtype=torch.float64) - 0.5) / len(values)
    found, expected = torch.special.ndtri(values), torch.special.ndtri(levels)
    inside = found.isfinite()
    ax = axes(ax)
    low, high = float(expected[0]), float(expected[-1])
    ax.plot([low, high], [low, high], color="0.6", linestyle="dashed", linewidth=1)
    ax.plot(expected[inside], found[inside], "o", markersize=3, label=label)
    ax.set(xlabel="quantile of a normal", ylabel="quantile of the standardised targets")
    if label:
        ax.legend(frameon=False)
    return ax
