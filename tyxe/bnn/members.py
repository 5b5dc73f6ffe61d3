"""The members of an ensemble: what they have to be, and how they are fitted."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.bnn.laplace import LaplaceBNN
from tyxe.bnn.passes import not_vectorized
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.stacked import fit_stacked
from tyxe.bnn.training import bars_named
from tyxe.bnn.variational import VariationalBNN
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.processes import all_or_none, shared
from tyxe.rng import RandomStream
from tyxe.util import on_error


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
