"""Accuracy while tasks are learned in sequence."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tyxe.metrics.checks import check_real
from tyxe.plotting.axes import axes, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def accuracy_over_tasks(results: Mapping[str, Tensor], ax: "Axes | None" = None) -> "Axes":
    r"""Draw the mean accuracy over the tasks seen, after each task, for several methods.

    Each curve is the mean over runs, with bars of two standard errors up and down if there are
    several.

    Args:
        results: for each method's name the accuracies `A[r, t, i]` of run `r` on task `i` after
            `t + 1` tasks, `(runs, T, T)`, or `(T, T)` for one run. Entries above the diagonal are
            ignored. Last rows of NaN are tasks to come; a task is drawn if all runs have finished.
        ax: axes to draw on; None makes a figure.

    Returns:
        The axes.

    Raises:
        ValueError: there are no results; accuracies of another shape, without a finished task, or
            with NaN among those of finished ones.

    References:
        [T] fig. 5.4.

    Example:
        >>> ax = accuracy_over_tasks({"VCL": torch.tensor([[1.0, 0.0], [0.9, 0.7]])})
        >>> [round(value) for value in ax.lines[0].get_ydata()]
        [100, 80]
    """
    if not results:
        raise ValueError(
            "`results` is empty, expected at least one method: "
            'pass {"name": accuracies of (runs, T, T)}'
        )
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
    if accuracy.dim() not in (2, 3) or accuracy.shape[-1] != accuracy.shape[-2]:
        raise ValueError(
            f"the accuracies of {name!r} have shape {tuple(accuracy.shape)}, expected "
            "(runs, T, T): after each task, on each task"
        )
    lower = accuracy.detach().tril().cpu().double()
    lower = lower[None] if lower.dim() == 2 else lower
    if not (tasks := _finished(lower)):
        raise ValueError(
            f"the accuracies of {name!r} are all NaN after the first task: leave {name!r} out "
            "until each of its runs has finished a task"
        )
    return check_real(label, lower[:, :tasks, :tasks]).sum(-1) / torch.arange(1, tasks + 1)


def _finished(lower: Tensor) -> int:
    """Return how many tasks all runs have finished; rows of later ones are all NaN."""
    tasks = lower.shape[-1]
    to_come = (lower.isnan().sum(-1) == torch.arange(1, tasks + 1)).any(0)
    return tasks - int(to_come.flip(0).int().cumprod(0).sum())
