"""Fits in several processes, whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tyxe.bnn.elbo import Objective
from tyxe.errors import warn

Parallel = Callable[[nn.Module], DistributedDataParallel]


class Processes:
    """The processes of one fit: this one alone, or the group that averages its gradients.

    With `R` processes of `b` points each, the likelihood's plate scales by `N / b`, and the average
    of the gradients is that of `beta KL - N / (R b) sum_n log p(y_n | f(x_n, w))` [T 4.6], with
    the KL once and the data term scaled by the whole batch. All processes need the same `b`, which
    is checked. `parallel` is `DistributedDataParallel`, a partial of it, or None; anything else is
    a TypeError.
    """

    def __init__(self, objective: Objective, parallel: Parallel | None) -> None:
        self.objective: nn.Module = objective
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

    def equal_batches(self, batches: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Return this process's batches, as long as all processes have one of the same size.

        Different sizes or numbers of batches are a ValueError in all processes, before the step.
        """
        return batches if self._group is None else self._compared(batches)

    def _compared(self, batches: Iterator[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        for batch in batches:
            self._check_sizes(len(batch[1]))
            yield batch
        self._check_sizes(-1)

    def _check_sizes(self, rows: int) -> None:
        count = torch.distributed.get_world_size(self._group)
        given = torch.tensor([rows], device=self._device)
        sizes = [torch.empty_like(given) for _ in range(count)]
        torch.distributed.all_gather(sizes, given, group=self._group)
        found = [int(size) for size in sizes]
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
