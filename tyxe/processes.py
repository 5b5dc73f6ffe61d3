"""What several processes do together: sums, errors of all, and fits of averaged gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from tyxe import check
from tyxe.errors import warn
from tyxe.util import is_plain, on_error


def check_group(group: Any) -> Any:
    """Return a group of processes, or None."""
    kinds = torch.distributed.ProcessGroup if torch.distributed.is_available() else ()
    expected = "one of torch.distributed, such as group.WORLD, or None"
    return group if group is None else check.one_of("process_group", group, kinds, expected)


@contextmanager
def all_or_none(group: Any) -> Iterator[None]:
    """Let all processes of a group come out of a part of their work, or none.

    The error of one is a RuntimeError in all others, which would wait for it otherwise. Without a
    group, this is one process.
    """
    try:
        yield
    except BaseException:
        if group is not None:
            _failures(1, group)
        raise
    if group is not None and (count := _failures(0, group)):
        raise RuntimeError(
            f"{count} of {torch.distributed.get_world_size(group)} processes failed, and so do all:"
            " look at the error there"
        )


def _failures(own: int, group: Any) -> int:
    is_cuda = torch.distributed.get_backend(group) == "nccl"
    flag = torch.tensor([own], device="cuda" if is_cuda else "cpu")
    return int(total(flag, group)[0])


def shared(value: Any, owner: int, group: Any) -> Any:
    """Return the value that one of the processes has, of those in the group."""
    box = [value]
    source = torch.distributed.get_global_rank(group, owner)
    torch.distributed.broadcast_object_list(box, source, group)
    return box[0]


def total(values: Tensor, group: Any) -> Tensor:
    """Return the sum over processes, in place."""
    torch.distributed.all_reduce(values, group=group)
    return values


# --------------------------------------------------------------------------- fits

Parallel = Callable[[nn.Module], Any]


class Shards:
    """The parameters of a module that `fully_shard` divides between processes, if it is called so.

    They are whole, in the tensors that they were, but from `divide` to `gather`. The state of their
    optimiser is divided with them.
    """

    def __init__(self, module: nn.Module, wrapper: Parallel | None) -> None:
        kinds = "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
        # Scripted parts hand out no places of their parameters, which stay whole.
        known = [] if wrapper is None else module.modules()
        parts = [p for p in known if not isinstance(p, torch.jit.ScriptModule)]
        self._places = [part._parameters for part in parts]
        hooks = (part.__dict__[kind] for part in parts for kind in kinds)
        self._hooks = [(each, {*each}) for each in hooks]
        wholes: list[Any] = [p for place in self._places for p in place.values()]
        self.module = module if wrapper is None else _wrapped_whole(module, wrapper)
        found: list[Any] = [p for place in self._places for p in place.values()]
        pairs = zip(wholes, found, strict=True)
        self._parts = {whole: part for whole, part in pairs if part is not whole}
        self._wholes = {part: whole for whole, part in self._parts.items()}
        self.mesh: Any = next((part.device_mesh for part in self._wholes), None)
        self._is_divided = False
        self._put(self._wholes)

    def _put(self, others: dict[Any, Any]) -> None:
        """Put other parameters in the places of some, and remove hooks for states in parts."""
        for place in self._places:
            place.update({name: others[held] for name, held in place.items() if held in others})
        for hooks, before in self._hooks:
            for key in hooks.keys() - before:
                del hooks[key]

    @torch.no_grad()
    def divide(self, optimizer: Optimizer | None = None) -> None:
        """Leave to each process its part of the first one's parameters."""
        self._is_divided = bool(self._parts)
        if not self._is_divided:
            return
        for whole, part in self._parts.items():
            part.to_local().copy_(_divided(whole, part).to_local())
            whole.data, whole.grad = whole.new_empty(0), None
        self._put(self._parts)
        _exchange(optimizer, self._parts, _divided)

    @torch.no_grad()
    def gather(self, optimizer: Optimizer | None = None) -> None:
        """Make whole what is divided."""
        if not self._is_divided:
            return
        self._is_divided = False
        for whole, part in self._parts.items():
            whole.data = part.full_tensor()
        self._put(self._wholes)
        _exchange(optimizer, self._wholes, lambda value, _: value.full_tensor())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have whole parameters for a while; changes to them are kept."""
        self.gather()
        try:
            yield
        finally:
            self.divide()


def _wrapped_whole(module: nn.Module, wrapper: Parallel) -> Any:
    """Return what a wrapper makes of a module alone; after an error everything is as it was."""
    before: list[Any] = []
    for part in module.modules():
        tables = [(table, {**table}) for table in vars(part).values() if isinstance(table, dict)]
        before.append((part, type(part), {**vars(part)}, tables))

    def restore() -> None:
        for part, kind, attributes, tables in before:
            part.__class__ = kind
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            for table, entries in tables:
                table.clear()
                table.update(entries)
            # PyTorch has no call that lets a module be divided anew.
            _composable_state._module_state_mapping.pop(part, None)

    with on_error(restore):
        found = wrapper(module)
        if any(type(part) is not kind for part, kind, *_ in before[1:]):
            raise TypeError(
                "parallel divides modules inside of the objective, whose parameters a fit takes "
                "from outside of them: shard the objective as one unit: parallel=fully_shard"
            )
    return found


def _divided(whole: Tensor, like: Any) -> Any:
    # What has made `like` has imported this, which is not in all builds of PyTorch.
    sharding = torch.distributed.tensor
    return sharding.distribute_tensor(whole.detach(), like.device_mesh, like.placements)


def _exchange(
    optimizer: Optimizer | None, others: dict[Any, Any], convert: Callable[..., Any]
) -> None:
    """Let an optimiser have other parameters, and convert its tensors of their shape."""
    for group in [] if optimizer is None else optimizer.param_groups:
        group["params"] = [others.get(held, held) for held in group["params"]]
    state = {} if optimizer is None else optimizer.state
    for held in [held for held in state if held in others]:
        other, own = others[held], state.pop(held)
        shapes = {key: getattr(value, "shape", None) for key, value in own.items()}
        own |= {k: convert(own[k], other) for k, shape in shapes.items() if shape == other.shape}
        state[other] = own


class Processes:
    """The processes of one fit: this one alone, or the group that averages its gradients.

    With `R` processes of `b` points each, the likelihood's plate scales by `N / b`, and the average
    of the gradients is that of `beta KL - N / (R b) sum_n log p(y_n | f(x_n, w))` [T 4.6], with
    the KL once and the data term scaled by the whole batch. All processes need batches of as many
    rows, which is checked; where fewer of them count, by weights or masks, a process has that share
    of a step. What ends a fit is decided by sums over all processes. `parallel` is
    `DistributedDataParallel`, `fully_shard`, a partial of one of them, or None; anything else is a
    TypeError.
    """

    def __init__(self, objective: nn.Module, parallel: Parallel | None) -> None:
        self._group: Any = None
        self._device = next(objective.parameters()).device
        # A module is callable as well, but with a batch.
        builder = None if isinstance(parallel, nn.Module) or not callable(parallel) else parallel
        self.shards = Shards(objective, builder)
        self.objective = wrapped = self.shards.module
        if isinstance(wrapped, DistributedDataParallel):
            self._group = wrapped.process_group
        elif self.shards.mesh is not None:
            self._group = self.shards.mesh.get_group()
        elif parallel is not None:
            raise TypeError(
                "parallel takes what makes a DistributedDataParallel of the objective, or divides "
                "its parameters: parallel=DistributedDataParallel, or fully_shard of "
                "torch.distributed.fsdp, or a functools.partial of one of them"
            )

    @property
    def first(self) -> bool:
        """Whether this is the process that shows progress."""
        return self._group is None or torch.distributed.get_rank(self._group) == 0

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self._group is None else torch.distributed.get_world_size(self._group)

    def all_or_none(self) -> AbstractContextManager[None]:
        """Let the error of one in a part of its work be an error of all, see `all_or_none`."""
        return all_or_none(self._group)

    def check_same(self, **settings: Any) -> None:
        """Raise a ValueError in all processes if one has other settings, and so would part."""
        if self._group is None:
            return
        told = {name: str(value) for name, value in settings.items()}
        own = [zlib.crc32(value.encode()) for value in told.values()]
        rows = zip(told.items(), *self._gathered(own), strict=True)
        wrong = [f"{name}={value}" for (name, value), *found in rows if len({*found}) > 1]
        if wrong:
            raise ValueError(
                f"the {self.count} processes differ in what has to be the same for all: process "
                f"{torch.distributed.get_rank(self._group)} has {', '.join(wrong)}"
            )

    def _gathered(self, numbers: list[int]) -> list[list[int]]:
        """Return the integers of each process."""
        given = torch.tensor(numbers, device=self._device)
        every = [torch.empty_like(given) for _ in range(self.count)]
        torch.distributed.all_gather(every, given, group=self._group)
        return [found.tolist() for found in every]

    def equal_batches(self, batches: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Return this process's batches, as long as all processes have one of the same size.

        Different sizes or numbers of batches are a ValueError in all processes, before the step.
        """
        return batches if self._group is None else self._compared(batches)

    def _compared(self, batches: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        while True:
            with self.all_or_none():
                batch = next(batches, None)
            self._check_sizes(-1 if batch is None else len(batch[1]))
            if batch is None:
                return
            yield batch

    def _check_sizes(self, rows: int) -> None:
        count, found = self.count, [size for (size,) in self._gathered([rows])]
        if len(set(found)) == 1:
            return
        problem = (
            f"the {count} processes have batches of {', '.join(map(str, found))} points; a batch "
            f"is shared out evenly, or its points would count unequally: choose a batch size that "
            f"{count} divides, and drop the rest of the data (drop_last=True)"
        )
        if -1 in found:
            problem = (
                f"the loaders of the {count} processes yield different numbers of batches: in an "
                f"epoch some have one more where process {found.index(-1)} has no batch left; "
                "give each as many points, as torch.utils.data.DistributedSampler does"
            )
        raise ValueError(problem)

    def total(self, values: list[float]) -> list[float]:
        """Return sums over the processes."""
        if self._group is None:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(sums, group=self._group)
        return [float(value) for value in sums]


def checksum(tensors: Iterable[Any]) -> int:
    """Return a number that tells whether other tensors have the same bits; not of sparse ones."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    dense = (t.detach().contiguous().flatten() for t in tensors if is_plain(t))
    sums = [int(t.view(kinds.get(t.element_size(), torch.int64)).sum()) for t in dense]
    return zlib.crc32(str(sums).encode())


def shuffle_anew(loader: Any, epoch: int, averaged: bool) -> None:
    """Set the epoch, counted from 0, of a loader's `DistributedSampler`, if it has one.

    Warn if the sampler yields a part of the data, and gradients are not `averaged`.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    sampler.set_epoch(epoch)
    if sampler.num_replicas > 1 and not averaged:
        warn(
            f"the loader has a part of the data, one of {sampler.num_replicas}, but no gradients "
            "are averaged over processes: VariationalBNN.fit takes "
            "parallel=DistributedDataParallel",
        )
