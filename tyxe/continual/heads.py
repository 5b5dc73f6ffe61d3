"""Parts of a net that each task has for itself, such as output layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from tyxe import check
from tyxe.bnn import BNN
from tyxe.errors import warn
from tyxe.priors.base import named_by
from tyxe.util import pyro_sample_sites

Task = str | int
Values = dict[str, Tensor]


class Heads:
    """Parts of a BNN's net, outside the prior, that each task has for itself.

    The net holds the head of one task, and this object the values of the others. Switching copies
    parameters and buffers in place, so optimisers and references to them remain valid. A warning
    names norms outside the parts, because all tasks would share their running statistics.

    Args:
        bnn: any wrapper, built with a prior that hides the parts.
        modules: names or globs of parts of `bnn.net`, such as `["2"]` or `["head*"]`.

    Raises:
        TypeError: not a BNN, or not a list of names.
        ValueError: the net has no such part, the part has no parameters or buffers, or one of its
            parameters is a site of the prior.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=["2"])
        >>> likelihood = tyxe.likelihoods.Bernoulli(10, event_dim=1)
        >>> bnn = tyxe.VariationalBNN(net, prior, likelihood, tyxe.guides.AutoNormal)
        >>> heads = Heads(bnn, modules=["2"])
        >>> heads.start("zero or one")
        >>> bnn.net[2].bias.data.fill_(3.0)
        tensor([3.])
        >>> heads.start("two or three")
        >>> bool(bnn.net[2].bias == net[2].bias)
        True
        >>> with heads.use("zero or one"):
        ...     bnn.net[2].bias.item()
        3.0
    """

    def __init__(self, bnn: BNN, modules: Iterable[str]) -> None:
        self._bnn = check.one_of("bnn", bnn, BNN, "a BNN of tyxe")
        expected = 'names or globs of parts of bnn.net, such as modules=["2"]'
        parts = check.listed("modules", modules)
        globs = [check.one_of("a part in modules", name, str, expected) for name in parts]
        # Places and not tensors, because moving a BNN replaces its buffers.
        self._places = _places_of(bnn, globs)
        self._warn_of_norms()
        self._start = self._snapshot()
        self._kept: dict[Task, Values] = {}
        self._current: Task | None = None

    @property
    def current(self) -> Task | None:
        """The task whose head is in the net; None before the first."""
        return self._current

    @property
    def tasks(self) -> list[Task]:
        """The tasks that have a head, in the order in which they were started."""
        return list(self._kept)

    def parameter_names(self) -> list[str]:
        """Return the names, in `bnn.net`, of all parameters and buffers that are switched."""
        return list(self._places)

    def check_of(self, bnn: BNN) -> None:
        """Raise a ValueError if the heads are those of another BNN."""
        if self._bnn is not bnn:
            raise ValueError(
                "the heads are those of another BNN, and would be switched there: build them of "
                "this one, Heads(bnn, modules=[...])"
            )

    @check.arguments
    def start(self, task: Task) -> None:
        """Give a new task a head with the net's original values, the same for every task.

        Raises:
            ValueError: the task has a head already.
        """
        if task in self._kept:
            raise ValueError(f"task {task!r} has a head already: go on with it by use({task!r})")
        self._keep_current()
        self._put(task, self._start)
        self._kept[task] = self._start

    @check.arguments
    def use(self, task: Task) -> ExitStack:
        """Put a task's head into the net; as a context manager, only inside the `with`.

        Raises:
            ValueError: the task has no head.
        """
        if task not in self._kept:
            known = ", ".join(map(repr, self._kept)) or "none"
            raise ValueError(
                f"task {task!r} has no head; those with one are: {known}. A new task begins with "
                f"start({task!r})"
            )
        before = self._current
        self._keep_current()
        self._put(task, self._kept[task])
        undone = ExitStack()
        if before is not None:
            undone.callback(self.use, before)
        return undone

    def state_dict(self) -> dict[str, Any]:
        """Return the heads of all tasks, safe for `torch.load(..., weights_only=True)`."""
        self._keep_current()
        kept = copy.deepcopy(self._kept)
        return {"current": self._current, "start": copy.deepcopy(self._start), "tasks": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the heads of another object for the same net, and put the current one into the net.

        Raises:
            ValueError: they are of other parts or shapes; nothing is changed.
        """
        for values in (state["start"], *state["tasks"].values()):
            check_shapes("the state is of heads with", values, self._tensors())
        self._start = copy.deepcopy(state["start"])
        self._kept = copy.deepcopy(dict(state["tasks"]))
        current = state["current"]
        self._put(current, self._start if current is None else self._kept[current])

    def _warn_of_norms(self) -> None:
        own = {id(module) for module, _ in self._places.values()}
        modes = self._bnn._fitted_modes()
        shared = [
            name
            for name, module in self._bnn.net.named_modules()
            if isinstance(module, _NormBase)
            and modes[module]  # its statistics would change
            and module.track_running_stats
            and module.running_mean is not None
            and id(module) not in own
        ]
        if shared:
            warn(
                f"the running statistics of {', '.join(shared)} are shared by all tasks and will "
                "be those of the last: let each task have its own, "
                f"Heads(bnn, modules=[..., {', '.join(map(repr, shared))}]), hidden from the "
                f"prior, hide_modules=[..., {', '.join(map(repr, shared))}]",
            )

    def _tensors(self) -> Values:
        return {name: getattr(*place) for name, place in self._places.items()}

    def _snapshot(self) -> Values:
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    def _keep_current(self) -> None:
        if self._current is not None:
            self._kept[self._current] = self._snapshot()

    def _put(self, task: Task | None, values: Values) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(values[name])
        self._current = task


def _places_of(bnn: BNN, globs: list[str]) -> dict[str, tuple[nn.Module, str]]:
    """Return the owners of all parameters and buffers of the named parts, by name in the net."""
    parts = [(name, name) for name, _ in bnn.net.named_modules() if name]
    heads = [name for glob in globs for name in named_by("modules", glob, parts)]
    named = [
        *bnn.net.named_parameters(remove_duplicate=False),
        *bnn.net.named_buffers(remove_duplicate=False),
    ]
    found = {name: tensor for name, tensor in named if any(name.startswith(f"{h}.") for h in heads)}
    if not found:
        raise ValueError(f"modules={globs} have neither parameters nor buffers to keep for a task")
    # By identity: a tied parameter has several names, and its site only the first.
    sites = {id(bnn.net.get_parameter(name)) for name in pyro_sample_sites(bnn.net)}
    for name, tensor in found.items():
        if id(tensor) in sites:
            raise ValueError(
                f"the head's {name!r} is a site of the prior, which all tasks share: hide it, "
                f"IIDPrior(..., hide_modules=[{name.rpartition('.')[0]!r}])"
            )
    owners = {name: name.rpartition(".") for name in found}
    return {n: (bnn.net.get_submodule(owner), own) for n, (owner, _, own) in owners.items()}


def check_shapes(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless tensors have the names and shapes of others."""
    found, expected = (
        [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        for tensors in (given, own)
    )
    if set(found) != set(expected):
        raise ValueError(f"{what} {', '.join(found)}; here there are {', '.join(expected)}")
