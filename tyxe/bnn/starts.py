"""Where chains start: at given values, draws, the net's own, or members that are trained for it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.bnn.potential import Potential, can_move, exclusive_unvalidated, points_of
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.standin import detached_copies
from tyxe.bnn.training import progress_bar
from tyxe.rng import fresh_seed
from tyxe.samplers.potential import in_turn
from tyxe.samplers.warm_start import WarmStart
from tyxe.threads import unvalidated
from tyxe.util import reset_parameters_, tree_map_tensors


def starts_of(
    potential: Potential, init: Any, num_chains: int | None, progress: bool | None
) -> Tensor:
    """Return the chains' starts, unconstrained, `(chains, d)`, see `MCMC_BNN.starts`."""
    if isinstance(init, Mapping):
        return _given(potential, init, num_chains)
    count = 4 if num_chains is None else num_chains
    if isinstance(init, WarmStart):
        return _trained(potential, init, count, progress)
    if isinstance(init, SupervisedBNN):
        return _stacked(potential, init._draws(count))
    hint = (
        ", a fitted BNN, tyxe.samplers.warm_start(...), or a mapping of joint names to values "
        "(chains, ...)"
    )
    if check.choice("init", init, ("prior", "net"), hint) == "net":
        return _stacked(potential, (_from_net(potential.bnn) for _ in range(count)))
    return _stacked(potential, (_from_prior(potential) for _ in range(count)))


def _trained(potential: Potential, init: WarmStart, count: int, progress: bool | None) -> Tensor:
    inputs, targets = potential.inputs, potential.targets
    members = _stacked(potential, _reinitialised(potential.bnn, count))
    generator = torch.Generator(members.device).manual_seed(fresh_seed())
    # How much a point weighs on average.
    weight = points_of(potential.bnn, targets) / len(targets)

    def loss(flat: Tensor, rows: Tensor) -> Tensor:
        batch = tree_map_tensors(lambda x: x[rows], inputs), targets[rows]
        return potential.loss(potential.unflatten(flat), *batch) / (weight * len(rows))

    epochs = init.train(loss, members, len(targets), generator)
    with progress_bar(range(init.num_epochs), "train members", "epoch", progress) as bar:
        while True:
            with exclusive_unvalidated():
                found = next(epochs, None)
            if found is None:
                return members
            members = found
            bar.update()


def _stacked(potential: Potential, draws: Iterable[Mapping[str, Tensor]]) -> Tensor:
    rows = []
    for draw in draws:
        missing = [name for name in potential.blocks.sites if name not in draw]
        if missing:
            raise ValueError(f"the starts have no values for {', '.join(missing)}")
        for name in potential.blocks.sites:
            check.shape(f"a start of {name!r}", draw[name], potential.priors[name].shape())
            # Before it is unconstrained, which would move it to the support's edge.
            if not bool(potential.priors[name].support.check(draw[name]).all()):
                raise ValueError(
                    f"a start of {name!r} is not finite, or not in its prior's support"
                )
        rows.append(potential.flatten({n: draw[n].detach() for n in potential.blocks.sites}))
    found = torch.stack(rows)
    for name, value in potential.unflatten(found).items():
        with unvalidated():
            density = [torch.as_tensor(potential.priors[name].log_prob(v)).sum() for v in value]
        if not bool(torch.stack(density).isfinite().all()):
            raise ValueError(f"a start of {name!r} has no density under its prior")
    return found


def _from_prior(potential: Potential) -> dict[str, Tensor]:
    """Return a draw from the prior, from which a chain can move if one of a hundred is so."""
    bnn = potential.bnn
    latents = bnn.likelihood.latent_priors().items()
    for _ in range(100):
        found = bnn.net_prior() | {f"{bnn.likelihood.prefix}.{n}": p.sample() for n, p in latents}
        with exclusive_unvalidated():
            gradient, value = in_turn(potential.at)(potential.flatten(found)[None])
        if bool(can_move(value, gradient)):
            break
    return found


def _from_net(bnn: SupervisedBNN) -> dict[str, Tensor]:
    means, found = bnn.likelihood.prior_means(), bnn._own_values()
    for name, prior in bnn.likelihood.latent_priors().items():
        # Some have no mean.
        value = means[name] if bool(means[name].isfinite().all()) else prior.sample()
        found[f"{bnn.likelihood.prefix}.{name}"] = value
    return found


def _reinitialised(bnn: SupervisedBNN, count: int) -> Iterator[dict[str, Tensor]]:
    """Yield the values of nets that are initialised anew, each from the next random numbers."""
    names = bnn.net_prior.names()
    for _ in range(count):
        net = copy.deepcopy(bnn.net, detached_copies(bnn.net))
        reset_parameters_(net, names)
        part_of, parameters = bnn.net_prior.part_of, net.named_parameters()
        anew = {bnn.net_prior.prefix + n: part_of(n, p) for n, p in parameters if n in names}
        yield _from_net(bnn) | anew


def _given(potential: Potential, init: Mapping[str, Tensor], num_chains: int | None) -> Tensor:
    for name in init:
        check.choice("site", name, potential.blocks.sites)
    values = {name: torch.as_tensor(value) for name, value in init.items()}
    first = next(iter(values.values()), torch.empty(1, device="cpu"))
    count = num_chains or first.shape[:1].numel()
    for name, value in values.items():
        shape = count, *potential.priors[name].shape()
        check.shape(f"init of {name!r}", value, shape, ", which is (num_chains, ...)")
    return _stacked(potential, ({n: v[i] for n, v in values.items()} for i in range(count)))
