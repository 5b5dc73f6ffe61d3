"""What several processes do together: sums, errors of all, and fits of averaged gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tyxe import check
from tyxe.errors import warn


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

Parallel = Callable[[nn.Module], DistributedDataParallel]


class Processes:
    """The processes of one fit: this one alone, or the group that averages its gradients.

    With `R` processes of `b` points each, the likelihood's plate scales by `N / b`, and the average
    of the gradients is that of `beta KL - N / (R b) sum_n log p(y_n | f(x_n, w))` [T 4.6], with
    the KL once and the data term scaled by the whole batch. All processes need batches of as many
    rows, which is checked; where fewer of them count, by weights or masks, a process has that share
    of a step. What ends a fit is decided by sums over all processes. `parallel` is
    `DistributedDataParallel`, a partial of it, or None; anything else is a TypeError.
    """

    def __init__(self, objective: nn.Module, parallel: Parallel | None) -> None:
        self.objective = objective
        self._group: Any = None
        self._device = next(objective.parameters()).device
        if parallel is None:
            return
        # A module is callable as well, but with a batch.
        is_builder = callable(parallel) and not isinstance(parallel, nn.Module)
        wrapped = parallel(objective) if is_builder else None
        if not isinstance(wrapped, DistributedDataParallel):
            raise TypeError(
                "parallel takes what makes a DistributedDataParallel of the objective: "
                "parallel=DistributedDataParallel, or a functools.partial of it"
            )
        self.objective, self._group = wrapped, wrapped.process_group

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
        if -1 in found:
            raise ValueError(
                f"the loaders of the {count} processes yield different numbers of batches: in an "
                f"epoch some have one more where process {found.index(-1)} has no batch left; "
                "give each as many points, as torch.utils.data.DistributedSampler does"
            )
        raise ValueError(
            f"the {count} processes have batches of {', '.join(map(str, found))} points; a batch "
            f"is shared out evenly, or its points would count unequally: choose a batch size that "
            f"{count} divides, and drop the rest of the data (drop_last=True)"
        )

    def total(self, values: list[float]) -> list[float]:
        """Return sums over the processes."""
        if self._group is None:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(sums, group=self._group)
        return [float(value) for value in sums]


def checksum(tensors: Iterable[Any]) -> int:
    """Return a number that tells whether other tensors have the same bits."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    dense = (t.detach().contiguous().flatten() for t in tensors if isinstance(t, Tensor))
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
