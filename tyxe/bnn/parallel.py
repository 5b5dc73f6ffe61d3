"""Fits in several processes, whose gradients are averaged, and of several BNNs in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
import torch.distributed
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DistributedSampler

from tyxe.bnn.elbo import (
    ElboTerms,
    Names,
    data_term,
    elbo_terms,
    statements_of,
    untraced_terms,
)
from tyxe.bnn.rerun import Resting
from tyxe.distributions.normal_kl import AddedKL
from tyxe.errors import warn
from tyxe.linalg.checks import numbers_unchecked
from tyxe.rng import torch_rng_kept
from tyxe.threads import exclusive
from tyxe.util import Inputs

Parallel = Callable[[nn.Module], DistributedDataParallel]


class Objective(nn.Module):
    """The loss of one draw, `(beta KL - data) / N / num_particles`, as a module to be wrapped.

    `bnn` is a `SupervisedBNN` with a `guide` program. `terms` are those of the latest forward, with
    their graph, until `take_terms` removes them; `added` is what then has gradients to add.
    """

    def __init__(self, bnn: Any, closed_form_kl: bool, num_particles: int) -> None:
        super().__init__()
        self.bnn = bnn
        self.closed_form_kl, self.num_particles = closed_form_kl, num_particles
        self.terms: ElboTerms | None = None
        self.added: AddedKL | None = None
        # Whether a trace has shown just the statements of the BNN's own programs.
        self._is_known = False

    def forward(
        self, inputs: Inputs, targets: Tensor, beta: float, untraced: bool = False
    ) -> Tensor:
        """Return one draw's part of the loss, in nats per data point.

        With `untraced`, forwards after the first do without Pyro's traces where nobody looks at
        them, and leave gradients to `add_gradients`.
        """
        found: tuple[ElboTerms, AddedKL | None] | None = None
        if untraced and self._is_known:
            found = untraced_terms(self.bnn, inputs, targets, self.closed_form_kl)
        if found is None:
            with Names() if untraced else nullcontext() as names:
                own = self.bnn.model, self.bnn.guide
                terms = elbo_terms(*own, inputs, targets, closed_form_kl=self.closed_form_kl)
            self._is_known = names is not None and names.found == statements_of(self.bnn, terms)
            found = terms, None
        self.terms, self.added = terms, _ = found
        return (beta * terms.kl - terms.data) * self._scale()

    def _scale(self) -> float:
        return 1.0 / (self.bnn.likelihood.dataset_size * self.num_particles)

    def add_gradients(self, weight: float) -> None:
        """Add the gradients that the latest forward's backward has left out.

        Args:
            weight: beta, times what that forward's loss has been multiplied by.
        """
        if self.added is not None:
            self.added.add_gradients(weight * self._scale())
            self.added = None

    def data_at(self, values: Any, inputs: Inputs, targets: Any) -> tuple[Tensor, Any]:
        """Return the log-likelihood, scaled to the data set, at sites' values; and the points."""
        with poutine.trace() as messenger:
            self.bnn.likelihood(self.bnn.run_net(values, inputs), targets)
        return data_term(messenger.trace)

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


class Together:
    """The objectives of several BNNs that differ in their tensors alone, as one function.

    Their gradients are one program of stacked tensors, which is traced once for every shape of a
    batch: `torch.func` gives the functions, and running them anew in each step takes three times as
    long as the program.

    Args:
        bnns: of the same structure, in the mode in which they are trained.
        batch: one that they are compared on.

    Attributes:
        parameters: what is trained, stacked, by the names of the first BNN.

    Raises:
        ValueError: BNNs that differ in more than the values of their tensors.
    """

    def __init__(self, bnns: Sequence[Any], batch: tuple[Any, Tensor]) -> None:
        self._states = [_state_of(bnn) for bnn in bnns]
        self._objective, *others = (Objective(bnn, True, 1) for bnn in bnns)
        for index, other in enumerate(others, 1):
            state = self._states[index]
            if _kinds_of(state) != _kinds_of(self._states[0]) or not torch.equal(
                _loss_at(self._objective, state, batch), _loss_at(other, state, batch)
            ):
                raise ValueError(
                    "vectorize=True takes members that differ in values of their tensors alone, "
                    f"and the net, prior or likelihood of member {index} is another than that of "
                    "member 0: leave vectorize out"
                )
        stacked = {n: torch.stack([s[n].detach() for s in self._states]) for n in self._states[0]}
        trained = {name: t for name, t in self._states[0].items() if t.requires_grad}
        loss = _loss_at(self._objective, self._states[0], batch)
        gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        # An optimiser leaves alone what has no gradient, even with weight decay.
        used = [n for n, gradient in zip(trained, gradients, strict=True) if gradient is not None]
        self.parameters = {name: nn.Parameter(stacked.pop(name)) for name in used}
        self._constants = stacked
        self._programs: dict[Any, Any] = {}

    def gradients(
        self, batches: Sequence[tuple[Any, Tensor]], beta: float
    ) -> tuple[Tensor, Tensor]:
        """Set the gradients of the parameters, and return data terms and KLs, one for each BNN.

        Raises:
            ValueError: `torch.vmap` does not take the net, or the batches, which have other things
                than tensors, or different shapes.
        """
        leaves, places = zip(*(tree_flatten(batch) for batch in batches), strict=True)
        shapes = [[getattr(leaf, "shape", None) for leaf in row] for row in leaves]
        if None in shapes[0] or any(row != shapes[0] for row in shapes):
            raise ValueError(
                "vectorize=True takes batches of tensors alone, of the same shapes for all "
                f"members, and has {shapes}: leave vectorize out"
            )
        data = [torch.stack(parts) for parts in zip(*leaves, strict=True)]
        weight = torch.tensor(beta)
        values = {name: p.detach() for name, p in self.parameters.items()}
        key = tuple((part.shape, part.dtype) for part in data)
        if key not in self._programs:
            self._programs[key] = self._traced(places[0], values, data, weight)
        found, terms = self._programs[key](values, self._constants, data, weight)
        for name, parameter in self.parameters.items():
            parameter.grad = found[name]
        return terms

    def _traced(self, place: Any, *given: Any) -> Any:
        def loss(values: Any, constants: Any, leaves: Any, beta: Tensor) -> Any:
            named = {f"bnn.{name}": value for name, value in {**values, **constants}.items()}
            batch = tree_unflatten(leaves, place)
            value = torch.func.functional_call(self._objective, named, (*batch, beta))
            terms = self._objective.take_terms()
            return value, (terms.data, terms.kl)

        one = torch.func.grad(loss, has_aux=True)
        every = torch.vmap(one, in_dims=(0, 0, 0, None), randomness="different")
        values, *rest = given
        arguments = (values, self._constants, *rest)
        with exclusive(), pyro.validation_enabled(False), numbers_unchecked(True):
            try:
                return make_fx(every)(*tree_map(torch.clone, arguments))
            except Exception as refused:
                self._objective(*tree_unflatten([part[0] for part in rest[0]], place), rest[1])
                reason = str(refused).strip().split("\n")[0]
                raise ValueError(
                    f"vectorize=True needs nets that torch.vmap takes, and not so this: {reason}; "
                    "leave vectorize out"
                ) from refused

    @torch.no_grad()
    def hand_over(self) -> None:
        """Copy what has been trained into the BNNs."""
        for name, stacked in {**self.parameters, **self._constants}.items():
            for state, value in zip(self._states, stacked, strict=True):
                state[name].copy_(value)


def _loss_at(objective: Objective, state: dict[str, Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    """Return the loss with tensors in the place of the BNN's, by the same draws in each call."""
    named = {f"bnn.{n}": t if t.requires_grad else t.clone() for n, t in state.items()}
    with torch_rng_kept(), exclusive():
        torch.manual_seed(0)
        loss: Tensor = torch.func.functional_call(objective, named, (*batch, 1.0))
    objective.take_terms()
    return loss


def _kinds_of(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: (t.shape, t.dtype, t.requires_grad) for name, t in state.items()}


def _state_of(bnn: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, but not the values in whose places draws are put."""
    named = {**dict(bnn.named_parameters()), **dict(bnn.named_buffers())}
    return {name: t for name, t in named.items() if not isinstance(t, Resting)}
