"""The loop over tasks, and summaries of its accuracies: average, forgetting, transfer."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tyxe import check, files
from tyxe.bnn import BNN, MCMC_BNN
from tyxe.continual.heads import Heads, Task
from tyxe.priors import DictPrior
from tyxe.rng import random_state, set_random_state
from tyxe.threads import exclusive
from tyxe.util import pyro_sample_sites

_KEYS = {"tasks", "done", "accuracy", "bnn", "heads", "parts", "rng"}


@check.arguments
def posterior_to_prior(bnn: BNN) -> None:
    """Make the posterior of a BNN its prior.

    A BNN without sites (maximum likelihood) stays as it is.

    Args:
        bnn: a wrapper with `net_guide`.

    Raises:
        TypeError: the BNN has draws and no guide.
        ValueError: the posterior does not fit as a prior; the old prior then stays.

    Reference:
        [T] listing 5.6.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
        >>> posterior_to_prior(bnn)
        >>> abs(tyxe.bnn.elbo_terms(bnn.net_prior, bnn.net_guide).kl.item()) < 1e-6
        True
    """
    sites = pyro_sample_sites(bnn.net)
    if sites:
        if isinstance(bnn, MCMC_BNN):
            raise TypeError(
                "an MCMC_BNN has draws, and no guide whose posterior could become the prior: pass "
                "update= to the TaskLoop, or use VariationalBNN or LaplaceBNN"
            )
        with exclusive():
            guide: Any = bnn.net_guide
            posteriors = guide.get_detached_distributions(sites)
            bnn.update_prior(DictPrior(posteriors))


class TaskLoop:
    r"""For each task: fit, update, evaluate on all tasks seen. Stops and resumes between tasks.

    The accuracy matrix `A` has `A[t, i]`, the score on task `i` after `t + 1` tasks; it is NaN
    for `i > t`, except for `A[t, t + 1]` with `ahead`: the score on the next task before its fit.

    If a call raises, the next `run` repeats that call, or continues from the checkpoint. So no task
    is fitted again with the posterior of its own data as prior.

    Args:
        bnn: any wrapper.
        tasks: names or integers, in the order in which they are learned.
        fit: `fit(task)` trains on the task's data.
        evaluate: `evaluate(task)` returns a score, such as the accuracy on its test data.
        update: `update(task)` after the fit; by default the posterior becomes the prior.
        heads: switched to the task before each of these calls, and started for new tasks.
        ahead: score each task before its fit as well, for `forward_transfer`.
        parts: other objects to save, by name, each with `state_dict` and `load_state_dict`:
            penalties, coresets, an optimiser for all tasks.

    Raises:
        TypeError: a string instead of the tasks, or a task that is neither string nor integer.
        ValueError: no tasks, or one twice; heads of another BNN.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Bernoulli(3, event_dim=1), tyxe.guides.AutoNormal)
        >>> x, y = torch.eye(3, 2), torch.ones(3, 1)
        >>> loop = TaskLoop(
        ...     bnn, ["first", "second"],
        ...     fit=lambda task: bnn.fit([(x, y)], torch.optim.Adam, 2, progress=False),
        ...     evaluate=lambda task: 1 - bnn.evaluate(x, y, reduction="mean")[0].item())
        >>> loop.run().shape
        torch.Size([2, 2])
    """

    @check.arguments
    def __init__(
        self,
        bnn: BNN,
        tasks: Iterable[Task],
        fit: Callable[[Task], Any],
        evaluate: Callable[[Task], float],
        update: Callable[[Task], Any] | None = None,
        *,
        heads: Heads | None = None,
        ahead: bool = False,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        self.tasks = list(tasks)
        for task in self.tasks:
            # Subclasses, such as NumPy's, can be saved but not loaded.
            if type(task) not in (str, int):
                raise TypeError(
                    f"tasks has {task!r}, a {type(task).__name__}; expected names or numbers, str "
                    "or int, such as [*range(5)] or array.tolist()"
                )
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks is {self.tasks}; expected at least one, and none twice")
        if heads is not None:
            heads.check_of(bnn)
        self.bnn, self.fit, self.evaluate = bnn, fit, evaluate
        self.update = update or (lambda _: posterior_to_prior(bnn))
        self.heads, self.ahead = heads, ahead
        self.parts = dict(parts or {})
        self.done = 0
        self._steps_done = 0  # of the present task
        self.accuracy = torch.full((len(self.tasks),) * 2, math.nan, device="cpu")

    @check.arguments
    def run(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        callback: Callable[[Task, Tensor], Any] | None = None,
    ) -> Tensor:
        """Learn the tasks that are left.

        Args:
            checkpoint: a file, which is read if it exists, and written at the start and after each
                task. If a run is stopped while it writes, the earlier file stays.
            callback: `callback(task, scores)` after each, with the scores on all tasks seen; the
                loop stops if it returns True, and continues with the next `run`.

        Returns:
            The accuracy matrix, `(tasks, tasks)`.

        Raises:
            ValueError: the file is damaged, not a checkpoint, or of other tasks or another order.
        """
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None and path.exists():
            state = files.read(path)  # each part moves what it loads to its own device
            if not (isinstance(state, dict) and state.keys() >= _KEYS):
                raise ValueError(f"{path} is not a checkpoint of a TaskLoop: give another file")
            self.load_state_dict(state)
        elif path is not None:
            # A run that is stopped in its first task begins it again with the same random numbers.
            files.write(path, self.state_dict())
        while self.done < len(self.tasks):
            scores = self._learn(self.tasks[self.done])
            if path is not None:
                files.write(path, self.state_dict())
            if callback is not None and callback(self.tasks[self.done - 1], scores):
                break
        return self.accuracy.clone()

    def _learn(self, task: Task) -> Tensor:
        if self.heads is not None:
            # A task that was interrupted in this process has a head already.
            (self.heads.use if task in self.heads.tasks else self.heads.start)(task)
        # A second fit under the posterior of the first would count the data twice.
        for step in (self._look_ahead, self.fit, self.update, self._look_back)[self._steps_done :]:
            step(task)
            self._steps_done += 1
        self._steps_done = 0
        self.done += 1
        return self.accuracy[self.done - 1, : self.done].clone()

    def _look_ahead(self, task: Task) -> None:
        if self.ahead and self.done:
            self.accuracy[self.done - 1, self.done] = float(self.evaluate(task))

    def _look_back(self, task: Task) -> None:
        for index, seen in enumerate(self.tasks[: self.done + 1]):
            with nullcontext() if self.heads is None else self.heads.use(seen):
                self.accuracy[self.done, index] = float(self.evaluate(seen))

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return all that the remaining tasks depend on, safe for `torch.load(weights_only=True)`.

        These are the BNN with its prior, heads, scores, further parts, and the states of the global
        random generators of PyTorch, NumPy and Python.
        """
        with exclusive():
            return {
                "tasks": list(self.tasks),
                "done": self.done,
                "steps": self._steps_done,
                "accuracy": self.accuracy.clone(),
                "bnn": copy.deepcopy(self.bnn.state_dict()),
                "heads": None if self.heads is None else self.heads.state_dict(),
                # Copied, because an optimiser changes the tensors of its state in place.
                "parts": {n: copy.deepcopy(part.state_dict()) for n, part in self.parts.items()},
                **random_state(),
                **self.bnn._not_saved(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loop stopped; BNN, heads and parts are overwritten.

        This loop may have more tasks, after those of the other.

        Raises:
            ValueError: the state is of other tasks or another order, or of other parts.
            RuntimeError: it is that of another BNN. No error leaves anything changed.
        """
        learned = list(state["tasks"])
        if self.tasks[: len(learned)] != learned:
            raise ValueError(
                f"the run to resume has the tasks {learned}, this loop {self.tasks}: resume in the "
                "same order, or start anew without the checkpoint"
            )
        saved, own = (
            sorted([*parts, *([] if heads is None else ["heads"])])
            for parts, heads in ((state["parts"], state["heads"]), (self.parts, self.heads))
        )
        if saved != own:
            raise ValueError(f"the run to resume has the parts {saved}, this loop {own}")
        with exclusive(), ExitStack() as undone:
            undone.callback(setattr, self.bnn, "_stage", self.bnn._stage)
            undone.callback(self._take, self.state_dict(), strict=False)
            undone.callback(self.bnn.net_prior.restore, self.bnn.net_prior.snapshot())
            self._take(state)
            undone.pop_all()
        self.bnn._warn_of_not_saved(state)

    def _take(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.bnn.load_state_dict(state["bnn"], strict)
        if self.heads is not None:
            self.heads.load_state_dict(state["heads"])
        for name, part in self.parts.items():
            part.load_state_dict(copy.deepcopy(state["parts"][name]))
        self.done, size = state["done"], len(state["tasks"])
        self._steps_done = state.get("steps", 0)  # older states were all saved between tasks
        self.accuracy = torch.full_like(self.accuracy, math.nan)
        self.accuracy[:size, :size] = state["accuracy"]
        set_random_state(state)


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
