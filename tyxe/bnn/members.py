"""The members of an ensemble: what they have to be, and how they are fitted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tyxe import check
from tyxe.bnn.batches import OwnBatches, device_for
from tyxe.bnn.checkpoint import History
from tyxe.bnn.checks import check_num_epochs, check_one_batch, warn_of_size
from tyxe.bnn.compiled import ObjectiveFunction, factors_of, tensors_of
from tyxe.bnn.elbo import MeanWeight, Objective
from tyxe.bnn.laplace import LaplaceBNN
from tyxe.bnn.passes import not_vectorized
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.trained import held_out_sums
from tyxe.bnn.training import FitOptions, bars_named, progress_bar
from tyxe.bnn.variational import VariationalBNN
from tyxe.check import described
from tyxe.data import Unpack, alike_batches
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.optim import ParticleOptimizer
from tyxe.optim.groups import make_optimizer, pyro_clipping
from tyxe.processes import all_or_none, shared
from tyxe.program import Program
from tyxe.rng import RandomStream, torch_rng_kept
from tyxe.samplers.warm_start import EarlyStopping, train_stacked
from tyxe.threads import exclusive, unvalidated
from tyxe.util import kind_of_batch, on_error

Batch = tuple[Any, Any]


def fit_stacked(
    members: list[Any],
    seeds: list[int],
    data_loader: Iterable[Any],
    optim: Any,
    num_epochs: int,
    device: Any = None,
    *,
    beta: float | Callable[[int], float] = 1.0,
    clip_norm: float | None = None,
    progress: bool | None = None,
    unpack: Unpack | None = None,
    validation: Iterable[Any] | None = None,
    patience: int | None = None,
    restore_best: bool = True,
) -> list[History]:
    """Train BNNs in stacked tensors, each on the batches that it would meet alone from its seed."""
    num_epochs = check_num_epochs(optim, num_epochs)
    if pyro_clipping(optim) is not None:
        not_vectorized("takes no clip arguments of Pyro's, but clip_norm")
    first = members[0]
    options = FitOptions(beta, clip_norm, validation=validation, patience=patience)
    if isinstance(data_loader, Iterator):
        raise TypeError(
            f"data_loader is {described(data_loader)}, which can be used once only, and "
            "vectorize=True goes through it once for each member: pass a list or a DataLoader"
        )
    *_, data_loader = [member._to_fit(data_loader, unpack) for member in reversed(members)]
    device = device_for(first, device)
    batches = [OwnBatches(data_loader, device, seed) for seed in seeds]
    one = OwnBatches(data_loader, device, seeds[0]).take()
    check_one_batch(first, first._one_draw, *one)
    stacked = StackedObjectives(members, one)
    optimizer = make_optimizer(optim, stacked.parameters, first._parameter_kinds())
    if isinstance(optimizer, ParticleOptimizer):
        not_vectorized(
            f"takes optimisers of gradients, and {type(optimizer).__name__} takes its own"
        )
    histories, sums = [History() for _ in members], _Sums(first.likelihood, len(members))
    stopping = None
    if validation is not None:
        stopping = EarlyStopping(
            stacked.tensors,
            lambda: stacked.scores(validation, device, histories),
            patience,
            restore_best,
        )
    weight = 1.0

    def set_gradients(rows: Sequence[Batch]) -> Tensor:
        return sums.add(rows, stacked.gradients(rows, weight))

    def epochs() -> Iterator[Iterable[Sequence[Batch]]]:
        nonlocal weight
        for epoch in progress_bar(range(num_epochs), "fit members", "epoch", progress):
            weight = options.beta_at(epoch)
            for member in members:
                member._runtime.beta = weight
            yield zip(*(own.epoch() for own in batches), strict=True)

    steps = train_stacked(
        set_gradients,
        stacked.parameters,
        optimizer,
        epochs(),
        clip_norm=clip_norm,
        refuse=lambda bad, rows: _refuse(members, bad, rows[bad[0]]),
        stopping=stopping,
    )
    # Held-out data were scored by the members themselves.
    with on_error(stacked.hand_over, stacked.starts):
        for epoch, _ in enumerate(steps):
            if not epoch:
                warn_of_size(float(sums.points[0]), first.likelihood.dataset_size)
            for history, (data, kl) in zip(histories, sums.take(), strict=True):
                history.append(loss=weight * kl - data, log_likelihood=data, kl=kl)
        if stopping is not None and stopping.scores is not None:
            stopping.go_back()
            for history, own in zip(histories, stopping.epochs.tolist(), strict=True):
                for values in vars(history).values():
                    del values[own:]
        stacked.hand_over(stacked.tensors)
    for member, history in zip(members, histories, strict=True):
        member._end_epoch(len(history.loss) - 1)
    return histories


def _refuse(members: Sequence[Any], bad: list[int], batch: Batch) -> None:
    check_one_batch(members[bad[0]], members[bad[0]]._one_draw, *batch)
    raise RuntimeError(
        f"training stopped: the loss or the gradient of members {bad} is not finite. All are "
        "as they were before; a smaller learning rate, or clip_norm, helps"
    )


class _Sums:
    """Terms of an epoch's batches, by their points, of all members."""

    def __init__(self, likelihood: Any, count: int) -> None:
        self._likelihood = likelihood
        self._terms, self.points = (
            torch.zeros(2, count, device="cpu"),
            torch.zeros(count, dtype=torch.float64, device="cpu"),
        )

    def add(self, rows: Sequence[Batch], terms: tuple[Tensor, Tensor]) -> Tensor:
        """Add a batch of each member, and return what is finite where its loss is."""
        self._likelihood.check_rows(rows[0][1])
        both = torch.stack([*terms])
        found = [float(self._likelihood.count(own)) for _, own in rows]
        counts = torch.tensor(found, dtype=torch.float64, device="cpu")
        self._terms = self._terms.to(both) + counts.to(both) * both
        self.points = self.points + counts
        return both.sum(0)

    def take(self) -> list[list[float]]:
        """Return data term and KL of each member, averaged, and start anew."""
        points = self.points.where(self.points > 0, 1.0)  # without any, the sums are 0
        found: list[list[float]] = (self._terms / points.to(self._terms)).T.tolist()
        self._terms, self.points = self._terms * 0, self.points * 0
        return found


class StackedObjectives:
    """The objectives of several BNNs that differ in their tensors alone, as one function.

    Their gradients are one program of stacked tensors, which is traced once for every shape of a
    batch: running the functions of `torch.func` anew in each step takes three times as long.
    `parameters` are trained, `tensors` are these and all others that a step may change, by the
    names of the first BNN; `starts` are copies of what they were.
    """

    def __init__(self, bnns: Sequence[Any], batch: Batch) -> None:
        self._bnns = bnns
        self._states = [tensors_of(bnn) for bnn in bnns]
        objectives = [Objective(bnn, True, 1) for bnn in bnns]
        pairs = zip(objectives, self._states, strict=True)
        functions = [ObjectiveFunction(one, state.values()) for one, state in pairs]
        self._function, first = functions[0], self._states[0]
        if reason := self._function.what_changes(batch, {}):
            not_vectorized(f"takes nets that repeat their forwards, and of this one {reason}")
        given = [*zip(functions, self._states, strict=True)]
        losses = [_loss_at(function, state, batch) for function, state in given]
        if bad := [index for index, loss in enumerate(losses) if not loss.isfinite()]:
            _refuse(bnns, bad, batch)
        for index, (loss, state) in enumerate(zip(losses, self._states, strict=True)):
            if _kinds_of(state) != _kinds_of(first) or not torch.equal(
                loss, _loss_at(self._function, state, batch)
            ):
                not_vectorized(
                    "takes members that differ in values of their tensors alone, and the net, "
                    f"prior or likelihood of member {index} is another than that of member 0"
                )
        stacked = {n: torch.stack([s[n].detach() for s in self._states]) for n in first}
        trained = {name: t for name, t in first.items() if t.requires_grad}
        loss = _loss_at(self._function, first, batch)
        gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        # An optimiser leaves alone what has no gradient, even with weight decay.
        used = [n for n, gradient in zip(trained, gradients, strict=True) if gradient is not None]
        self.parameters = {name: nn.Parameter(stacked.pop(name)) for name in used}
        self._constants = stacked
        self.tensors = {**self.parameters, **stacked}
        self.starts = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self._programs: dict[Any, Program] = {}
        self._weights = [MeanWeight(bnn.likelihood) for bnn in bnns]

    def gradients(self, batches: Sequence[Batch], beta: float) -> tuple[Tensor, Tensor]:
        """Set the gradients of the parameters, and return data terms and KLs, one for each BNN."""
        loads = [own.load_of(t) for own, (_, t) in zip(self._weights, batches, strict=True)]
        batches = alike_batches(batches)
        shapes = [[getattr(leaf, "shape", None) for leaf in tree_leaves(each)] for each in batches]
        if None in shapes[0] or any(row != shapes[0] for row in shapes):
            not_vectorized(
                "takes batches of tensors alone, of the same shapes for all members, and has "
                f"{shapes}"
            )
        batch = tree_map(lambda *parts: torch.stack(parts), *batches)
        values = {name: p.detach() for name, p in self.parameters.items()}
        factors = factors_of(self._bnns[0], beta, loads)
        given = values, self._constants, batch, factors
        kind = kind_of_batch(batch)
        if kind not in self._programs:
            self._programs[kind] = self._traced(given, batches[0])
        found, terms = self._programs[kind](*given)
        for name, parameter in self.parameters.items():
            parameter.grad = found[name]
        return terms

    def _traced(self, given: Any, batch: Batch) -> Program:
        def loss(values: Any, constants: Any, batch: Any, factors: Tensor) -> Any:
            own = {**values, **constants}
            tensors = [own[n] for n in self._states[0]]
            found, terms = self._function(tensors, batch, factors.unbind())
            return found, (terms.data, terms.kl)

        one = torch.func.grad(loss, has_aux=True)
        every = torch.vmap(one, randomness="different")
        with exclusive(), unvalidated(), torch_rng_kept():
            try:
                return Program(every, *given, how="traced", draws=True)
            except Exception as refused:
                # What the net refuses as well is an error of its own.
                _loss_at(self._function, self._states[0], batch)
                reason = str(refused).strip().split("\n")[0]
                not_vectorized(
                    f"needs nets that torch.vmap takes, and not so this: {reason}", refused
                )

    def scores(self, loader: Any, device: Any, histories: Sequence[History]) -> Tensor:
        """Return the log-likelihood of held-out data of each BNN, and add it to its history."""
        self.hand_over(self.tensors)
        sums = [held_out_sums(bnn, loader, device) for bnn in self._bnns]
        found = [total / points if points else math.nan for total, points in sums]
        for history, score in zip(histories, found, strict=True):
            history.validation.append(score)
        return torch.tensor(found, device="cpu")

    @torch.no_grad()
    def hand_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy stacked tensors into the BNNs."""
        for name, stacked in tensors.items():
            for state, value in zip(self._states, stacked, strict=True):
                state[name].copy_(value)


def _kinds_of(state: Mapping[str, Tensor]) -> list[Any]:
    return [(name, t.shape, t.dtype, t.requires_grad) for name, t in state.items()]


def _loss_at(function: ObjectiveFunction, state: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return the loss by the same draws in each call, which changes none of the tensors."""
    own = [t.clone() for t in state.values()]
    with torch_rng_kept(0):
        return function(own, batch, [1.0])[0]


def fit_in_turn(ensemble: Any, member_callback: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Fit one after the other the members that are left."""
    found = []
    for index, seed in list(ensemble._left.items()):
        member: Any = ensemble.members[index]
        before, stage = copy.deepcopy(member.state_dict()), member._stage
        named = bars_named(f"member {index + 1}/{len(ensemble.members)}")
        with on_error(_restore, member, before, stage), RandomStream(seed), named:
            found.append(member.fit(*arguments, **options))
        del ensemble._left[index]
        if member_callback is not None:
            member_callback(ensemble, index)
    return found


def _restore(member: Any, state: Mapping[str, Any], stage: str) -> None:
    member.load_state_dict(state, strict=False)  # also to no samples
    member._stage = stage


def fit_shares(ensemble: Any, group: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Fit this process's share of the members that are left, and take the others'."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    left = shared(ensemble._left, 0, group)
    owners = {index: place % world for place, index in enumerate(left)}
    ensemble._left = {index: seed for index, seed in left.items() if owners[index] == rank}
    own = list(ensemble._left)
    try:
        with all_or_none(group):
            histories = dict(zip(own, fit_in_turn(ensemble, *arguments, **options), strict=True))
    finally:
        ensemble._left = left
    found = []
    for index, owner in owners.items():
        member = ensemble._bnns[index]
        mine = (member.state_dict(), histories[index]) if owner == rank else None
        state, history = shared(mine, owner, group)
        if owner != rank:
            member.load_state_dict(state)
        found.append(history)
    ensemble._left = {}
    return found


def fit_together(
    ensemble: Any, data_loader: Iterable[Any], optim: Any, num_epochs: int, **options: Any
) -> list[Any]:
    """Fit the members that are left all at once."""
    members, seeds = [ensemble._bnns[i] for i in ensemble._left], [*ensemble._left.values()]
    remedy = "take smaller batches, or leave vectorize out"
    with ExitStack() as stack, check.memory_remedy("all members at once", remedy):
        for member in members:
            if getattr(type(member), "fit", None) is not VariationalBNN.fit:
                not_vectorized(f"trains VariationalBNNs, and not a {type(member).__name__}")
            stack.enter_context(fitting(member, train=True))
            stack.enter_context(prior_fixed(member))
        found = fit_stacked(members, seeds, data_loader, optim, num_epochs, **options)
    ensemble._left = {}
    return found


def check_apart(members: list[SupervisedBNN]) -> None:
    """Raise for members that cannot be a mixture, and warn if all are the same."""
    kinds = dict.fromkeys(_meaning(member.likelihood) for member in members)
    if len(kinds) > 1:
        raise ValueError(f"the members have likelihoods of several kinds: {', '.join(kinds)}")
    owners: dict[int, int] = {}
    for index, member in enumerate(members):
        trained = {n: p for n, p in member.named_parameters() if p.requires_grad}
        for name, tensor in {**trained, **member._in_places()}.items():
            first = owners.setdefault(tensor.data_ptr() or id(tensor), index)
            if first != index:
                raise ValueError(
                    f"members {first} and {index} share {name!r}: make_member has to make a BNN, "
                    "with a copy of its own of all that is fitted, each time that it is called"
                )
    # Chains start at draws from their prior.
    given = [m for m in members if isinstance(m, VariationalBNN | LaplaceBNN)]
    starts = [{**dict(m.named_parameters()), **m._in_places()} for m in given]
    if len(starts) > 1 and all(_same(starts[0], other) for other in starts[1:]):
        warn(
            "all members start at the same weights, so that they differ by the order of batches "
            "alone: call tyxe.util.reset_parameters_(net), perhaps of its head, in make_member"
        )


def _meaning(likelihood: Likelihood) -> str:
    """Return what predictions mean by a likelihood, whose noise and size may be others."""
    names = {"logit_predictions", "positive_scale", "event_dim"} & vars(likelihood).keys()
    how = ", ".join(f"{name}={getattr(likelihood, name)}" for name in sorted(names))
    return f"{type(likelihood).__name__}({how})"


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
