"""Fits in several processes, each with a part of every batch, whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tyxe.bnn.elbo import ElboTerms, elbo_terms
from tyxe.errors import warn
from tyxe.util import Inputs

__all__ = ["Objective", "Parallel", "Processes", "shuffle_anew"]

Parallel = Callable[[nn.Module], DistributedDataParallel]


class Objective(nn.Module):
    """The loss of one draw, `(beta KL - data) / N / num_particles`, as a module to be wrapped.

    `bnn` is a `SupervisedBNN` with a `guide` program. `terms` are those of the latest forward, with
    their graph, until `take_terms` removes them.
    """

    def __init__(self, bnn: Any, closed_form_kl: bool, num_particles: int) -> None:
        super().__init__()
        self.bnn = bnn
        self.closed_form_kl, self.num_particles = closed_form_kl, num_particles
        self.terms: ElboTerms | None = None

    def forward(self, inputs: Inputs, targets: Tensor, beta: float) -> Tensor:
        """Return one draw's part of the loss, in nats per data point."""
        self.terms = terms = elbo_terms(
            self.bnn.model,
            self.bnn.guide,
            inputs,
            targets,
            closed_form_kl=self.closed_form_kl,
        )
        scale = 1.0 / (self.bnn.likelihood.dataset_size * self.num_particles)
        return (beta * terms.kl - terms.data) * scale

    def take_terms(self) -> ElboTerms:
        """Return the terms of the latest forward, and remove them."""
        terms, self.terms = self.terms, None
        assert terms is not None
        return terms


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
        wrapped = parallel(objective) if _is_builder(parallel) else None
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

    def in_step(self, batches: Iterable[tuple[Any, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Yield this process's batches, as long as all processes have one of the same size.

        Different sizes or numbers of batches are a ValueError in all processes, before the step.
        """
        if self._group is None:
            yield from batches
            return
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


def _is_builder(given: Any) -> bool:
    # A module is callable as well, but with a batch.
    return callable(given) and not isinstance(given, nn.Module)


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
