"""Summaries of a matrix of accuracies: average, forgetting, transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe import check


@check.arguments
def average_accuracy(accuracy: Tensor) -> Tensor:
    r"""Return the mean accuracy over the tasks seen, after each task: `1/(t+1) sum_{i<=t} A[t, i]`.

    Args:
        accuracy: `A[t, i]`, on task `i` after `t + 1` tasks, `(..., T, T)`, from `TaskLoop`;
            entries above the diagonal are ignored.

    Returns:
        `(..., T)`; NaN for tasks still to come.

    Raises:
        ValueError: it is not a square matrix.

    Reference:
        [T] fig. 5.4.

    Example:
        >>> average_accuracy(torch.tensor([[1.0, 0.0], [0.5, 0.9]]))
        tensor([1.0000, 0.7000])
    """
    count = torch.arange(1, _tasks(accuracy) + 1, device=accuracy.device)
    return accuracy.where(_seen(accuracy), accuracy.new_zeros(())).sum(-1) / count


@check.arguments
def forgetting(accuracy: Tensor) -> Tensor:
    r"""Return how much accuracy earlier tasks have lost since their best, after each task.

    `F_t = 1/t sum_{i<t} (max_{i<=l<t} A[l, i] - A[t, i])`, negative where they have gained. The
    matrix and its errors are those of `average_accuracy`.

    Returns:
        `(..., T)`; 0 after the first task.

    Reference:
        Chaudhry et al. (2018), Riemannian walk for incremental learning, eq. 3.

    Example:
        >>> forgetting(torch.tensor([[1.0, 0.0], [0.75, 0.9]]))
        tensor([0.0000, 0.2500])
    """
    count = torch.arange(1, _tasks(accuracy), device=accuracy.device)
    best = accuracy.where(_seen(accuracy), -torch.inf).cummax(-2).values[..., :-1, :-1]
    lost = (best - accuracy[..., 1:, :-1]).where(_seen(best), 0).sum(-1) / count
    first = accuracy[..., :1, 0]
    return torch.cat([first - first, lost], -1)


@check.arguments
def forward_transfer(accuracy: Tensor, baseline: Tensor) -> Tensor:
    r"""Return the gain of a task from earlier ones before its fit: `mean_{i>0} A[i-1, i] - b_i`.

    Args:
        accuracy: the matrix of `average_accuracy`, `(..., T, T)`, with the entries above the
            diagonal that `TaskLoop(..., ahead=True)` measures.
        baseline: accuracy on each task of the net before any training, `(T,)`.

    Returns:
        `(...)`.

    Raises:
        ValueError: the entries above the diagonal are missing; another number of tasks.

    Reference:
        Lopez-Paz and Ranzato (2017), Gradient episodic memory, eq. 4.

    Example:
        >>> forward_transfer(torch.tensor([[1.0, 0.75], [0.75, 0.9]]), torch.tensor([0.5, 0.5]))
        tensor(0.2500)
    """
    check.shape("baseline", baseline, (_tasks(accuracy, 2),), ", one number for each task")
    ahead = accuracy.diagonal(1, dim1=-2, dim2=-1)
    if bool(ahead.isnan().any()):
        raise ValueError(
            "the matrix has no accuracy of a task before its fit: run TaskLoop(..., ahead=True)"
        )
    return (ahead - baseline[1:]).mean(-1)


def _tasks(accuracy: Tensor, least: int = 1) -> int:
    tasks = check.count("number of tasks", accuracy.shape[-1], least)
    expected = (*accuracy.shape[:-2], tasks, tasks)
    check.shape("accuracy", accuracy, expected, ": after each task, on each task")
    return tasks


def _seen(accuracy: Tensor) -> Tensor:
    return torch.ones_like(accuracy, dtype=torch.bool).tril()
