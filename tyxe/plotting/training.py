"""Training curves, and accuracy while tasks are learned in sequence."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.metrics.checks import check_real
from tyxe.plotting.axes import PALETTE, axes, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# So many times as high as later epochs are the first ones that would flatten them.
FLAT = 3.0


def history(history: Any, ax: "Axes | None" = None) -> "Axes":
    r"""Draw the training curves of a fit: loss, negative log-likelihood and KL.

    `loss = beta * kl - log_likelihood`: the log-likelihood is drawn with the opposite sign, so that
    the other two add up to the loss at `beta = 1`. If the first epochs would leave no height for
    the others, the axes show the others, and an inset shows all epochs.

    Args:
        history: the result of `fit`, or any object with its three lists, `loss`, `log_likelihood`
            and `kl`, of one number per epoch.

    Example:
        >>> from types import SimpleNamespace
        >>> fitted = SimpleNamespace(loss=[9.0, 5.0], log_likelihood=[-8.0, -3.0], kl=[1.0, 2.0])
        >>> ax = history(fitted)
        >>> [line.get_label() for line in ax.lines]
        ['loss', 'negative log-likelihood', 'KL']
    """
    ax = axes(ax)
    curves: dict[str, list[float]] = {
        "loss": history.loss,
        "negative log-likelihood": [-value for value in history.log_likelihood],
        "KL": history.kl,
    }
    _draw_curves(ax, curves)
    later = {label: values[len(values) // 10 :] for label, values in curves.items()}
    low, high = _range_of(later)
    if len(history.loss) >= 20 and _range_of(curves)[1] - low > FLAT * (high - low) > 0:
        margin = 0.05 * (high - low)
        ax.set_ylim(low - margin, high + margin)
        inset = ax.inset_axes((0.6, 0.6, 0.38, 0.36))
        _draw_curves(inset, curves)
        inset.tick_params(labelsize="x-small")
    ax.set(xlabel="epoch", ylabel="nats")
    ax.legend(frameon=False)
    return ax


def _draw_curves(ax: "Axes", curves: Mapping[str, list[float]]) -> None:
    styles = zip(curves.items(), PALETTE, ("solid", "dashed", "dashdot"), strict=False)
    for (label, values), color, linestyle in styles:
        epochs = range(1, len(values) + 1)
        ax.plot(epochs, values, color=color, linestyle=linestyle, label=label)
    ax.locator_params(axis="x", integer=True)


def _range_of(curves: Mapping[str, list[float]]) -> tuple[float, float]:
    """Return the lowest and highest finite values of all curves."""
    found = [value for values in curves.values() for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else (0.0, 0.0)


def accuracy_over_tasks(results: Mapping[str, Tensor], ax: "Axes | None" = None) -> "Axes":
    r"""Draw the mean accuracy over the tasks seen, after each task, for several methods.

    Each curve is the mean over runs, with bars of two standard errors up and down if there are
    several.

    Args:
        results: for each method's name the accuracies `A[r, t, i]` of run `r` on task `i` after
            `t + 1` tasks, `(runs, T, T)`, or `(T, T)` for one run. Entries above the diagonal are
            ignored. Last rows of NaN are tasks to come; a task is drawn if all runs finished it.

    Raises:
        ValueError: accuracies of another shape, without a finished task, or with NaN among those
            of finished ones.

    References:
        [T] fig. 5.4.

    Example:
        >>> ax = accuracy_over_tasks({"VCL": torch.tensor([[1.0, 0.0], [0.9, 0.7]])})
        >>> [round(value) for value in ax.lines[0].get_ydata()]
        [100, 80]
    """
    curves = {name: _over_tasks(name, accuracy) for name, accuracy in results.items()}
    ax = axes(ax)
    for i, (name, curve) in enumerate(curves.items()):
        runs, tasks = curve.shape
        error = 2 * curve.std(0) / runs**0.5 if runs > 1 else None
        color, marker = look_of(i)
        ax.errorbar(
            range(1, tasks + 1),
            (100 * curve.mean(0)).tolist(),
            None if error is None else (100 * error).tolist(),
            color=color,
            marker=marker,
            markersize=4.5,
            capsize=3,
            label=name,
        )
    ax.set(xlabel="tasks seen", ylabel="mean accuracy (%)")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False)
    return ax


def _over_tasks(name: str, accuracy: Tensor) -> Tensor:
    """Return the mean over the tasks seen, `(runs, tasks finished)`, in float64 on the CPU."""
    label = f"results[{name!r}]"
    check_real(label, accuracy.nan_to_num() if isinstance(accuracy, Tensor) else accuracy)
    accuracy = accuracy[None] if accuracy.dim() == 2 else accuracy
    square = accuracy.shape[-1:] * 2
    check.shape(label, accuracy, ("runs", *square), ": after each task, on each task")
    lower = accuracy.detach().tril().cpu().double()
    if not (tasks := _finished(lower)):
        raise ValueError(
            f"{label} is all NaN after the first task: leave {name!r} out until each of its runs "
            "has finished a task"
        )
    finished = check_real(label, lower[:, :tasks, :tasks])
    return finished.sum(-1) / torch.arange(1, tasks + 1, device="cpu")


def _finished(lower: Tensor) -> int:
    """Return how many tasks all runs have finished; rows of later ones are all NaN."""
    tasks = lower.shape[-1]
    to_come = (lower.isnan().sum(-1) == torch.arange(1, tasks + 1, device="cpu")).any(0)
    return tasks - int(to_come.flip(0).int().cumprod(0).sum())
