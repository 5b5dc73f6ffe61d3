"""One torch optimiser for all parameters, from a torch or Pyro optimiser, class or instance."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tyxe import check
from tyxe.errors import warn
from tyxe.program import is_dense
from tyxe.util import unwrapped

LR_KINDS = ("loc", "scale", "deterministic")

Named = Mapping[str, nn.Parameter]


@runtime_checkable
class ParticleOptimizer(Protocol):
    """A torch optimiser that computes its own gradients instead of the ELBO's.

    A fit calls `particle_of` once. It calls the returned `particle(inputs, targets, beta)` for each
    draw of a step; this adds `1 / options.num_particles` of a gradient to `.grad`, and returns the
    fields of `tyxe.bnn.ElboTerms`. `objective` has the `bnn`, and its log-likelihood
    `data_at(values, inputs, targets)`, whose gradient counts `objective.load` times, by the weights
    of a step's points; `options` are the arguments of `fit`.
    """

    def particle_of(self, objective: Any, options: Any) -> Callable[..., tuple[Any, ...]]:
        """Return the particle of a fit, or raise for a fit that the optimiser does not support."""


def make_optimizer(
    optim: Any,
    parameters: Named,
    kinds: Mapping[str, str],
    lr_multipliers: Mapping[str, float] | None = None,
    *,
    fused: bool = True,
) -> Optimizer:
    """Return a torch optimiser over named parameters, in one group for each kind.

    A Pyro optimiser would make a torch optimiser for each parameter. Here one for all is made with
    its constructor and arguments, and stored in its `optim_objs`, so that a second fit with the
    same object continues from the same state and its `step()` reaches the scheduler. Parameters of
    guides have no weight decay, unless an instance is given, which is warned of.

    Args:
        optim: a Pyro optimiser or scheduler; a torch optimiser class, or a partial of one; or an
            instance over the BNN's parameters, or a torch scheduler of one.
        kinds: the kind of each parameter, one of `LR_KINDS`, by name.
        lr_multipliers: factors of the learning rate, by kind.
        fused: choose a fused kernel where nothing else is asked for. Loops of others may scale or
            clip gradients in ways that such a kernel refuses.

    Raises:
        TypeError: another `optim`, or LBFGS.
        ValueError: unknown kinds, negative multipliers or any for an instance; an instance over
            other parameters.
    """
    factors = _checked_multipliers(lr_multipliers)
    # The likelihood's parameters, such as a noise, are a kind of their own.
    kinds = {
        name: "likelihood" if kind == "deterministic" and not name.startswith("net.") else kind
        for name, kind in kinds.items()
    }
    optim = optim.optimizer if isinstance(optim, LRScheduler) else optim
    _refuse_line_search(optim)
    if isinstance(optim, Optimizer):
        return _checked_instance(optim, parameters, kinds, factors)
    make = functools.partial(_new, parameters=parameters, kinds=kinds, factors=factors, fused=fused)
    if isinstance(optim, PyroOptim):
        return _from_pyro(optim, parameters, make)
    expected = (
        'a Pyro optimiser such as pyro.optim.Adam({"lr": 1e-3}), a torch optimiser class or '
        "partial of one, or an instance over bnn.parameters()"
    )
    return make(check.function("optim", optim, expected), {})


def _refuse_line_search(optim: Any) -> None:
    given = optim.pt_optim_constructor if isinstance(optim, PyroOptim) else optim
    constructor, _ = unwrapped(given)
    kind = constructor if isinstance(constructor, type) else type(constructor)
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError(
            f"{kind.__name__} evaluates one objective several times in a step, by a closure; the "
            "ELBO is drawn anew each time: pass a stochastic optimiser such as torch.optim.Adam"
        )


def _checked_multipliers(given: Mapping[str, float] | None) -> Mapping[str, float]:
    factors = {} if given is None else given
    check.one_of("lr_multipliers", factors, Mapping, "a mapping such as {'scale': 10}")
    for kind, factor in factors.items():
        check.choice("a kind of lr_multipliers", kind, LR_KINDS)
        check.number(f"lr_multipliers[{kind!r}]", factor, least=0)
    return factors


def _checked_instance(
    optimizer: Optimizer,
    parameters: Named,
    kinds: Mapping[str, str],
    factors: Mapping[str, float],
) -> Optimizer:
    if factors:
        raise ValueError(
            "lr_multipliers needs an optimiser that fit sets up; pass the class or a partial: "
            f"functools.partial(torch.optim.{type(optimizer).__name__}, lr=...)"
        )
    if not _held_by(optimizer) & {id(p) for p in parameters.values()}:
        raise ValueError(
            "the optimiser holds none of this BNN's parameters; build it on bnn.parameters() "
            "(the BNN works on a copy of the net)"
        )
    variational = {id(p) for name, p in parameters.items() if kinds[name] != "deterministic"}
    for group in optimizer.param_groups:
        if group.get("weight_decay") and variational & {id(p) for p in group["params"]}:
            warn(
                f"weight_decay={group['weight_decay']} pulls a guide's parameters to 0 on top of "
                "the prior, and logarithms of scales to 0, which widens the posterior: build the "
                "optimiser with weight_decay=0, or pass its class, for which fit does that"
            )
            break
    return optimizer


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _fused_option(
    constructor: Callable[..., Any], parameters: Named, given: Iterable[str] = ()
) -> dict[str, bool]:
    """Return the option of a fused kernel, unless the caller has chosen an implementation."""
    constructor, keywords = unwrapped(constructor)
    chosen, tensors = {*given, *keywords}, list(parameters.values())
    # Other optimisers may have sparse gradients, which fused kernels do not take; where two numbers
    # share a place in memory, these write beyond the end of it.
    is_known = isinstance(constructor, type) and issubclass(constructor, Adam | AdamW)
    if not is_known or chosen & {"fused", "foreach", "differentiable", "capturable"}:
        return {}
    fits = all(p.device.type in ("cpu", "cuda") and not p.is_complex() for p in tensors)
    fits = fits and "fused" in inspect.signature(constructor).parameters
    return {"fused": True} if fits and own_their_memory(tensors) else {}


def own_their_memory(tensors: Iterable[Tensor]) -> bool:
    """Whether each number of each tensor has a place in memory for itself, without gaps."""
    tensors = list(tensors)
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    are_apart = all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(spans))
    return are_apart and all(map(is_dense, tensors))


def _from_pyro(
    optim: PyroOptim, parameters: Named, make: Callable[[Any, Any], Optimizer]
) -> Optimizer:
    key = next(iter(parameters.values()))
    held = optim.optim_objs.get(key)
    optimizer: Any = held if held is None or isinstance(held, Optimizer) else held.optimizer
    if optimizer is None or _held_by(optimizer) != {id(p) for p in parameters.values()}:
        held = optimizer = make(optim.pt_optim_constructor, optim.pt_optim_args)
        if isinstance(optim, PyroLRScheduler):
            held = optim.pt_scheduler_constructor(optimizer, **optim.kwargs)
        optim.optim_objs[key] = held
    return optimizer


def _new(
    constructor: Callable[..., Any],
    arguments: Any,
    parameters: Named,
    kinds: Mapping[str, str],
    factors: Mapping[str, float],
    fused: bool,
) -> Optimizer:
    """Make an optimiser by options, or by Pyro's function that gives each parameter its own."""
    groups: list[dict[str, Any]]
    if callable(arguments):
        groups = [{"params": [p], **_call_args(arguments, n)} for n, p in parameters.items()]
        group_kinds, options = [kinds[name] for name in parameters], {}
    else:
        by_kind: dict[str, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            by_kind.setdefault(kinds[name], []).append(parameter)
        groups = [{"params": ps} for ps in by_kind.values()]
        group_kinds, options = list(by_kind), arguments
    if fused:
        options = {**options, **_fused_option(constructor, parameters, options)}
    optimizer = constructor(groups, **options)
    check.one_of("what optim makes", optimizer, Optimizer, "a torch optimiser")
    for group, kind in zip(optimizer.param_groups, group_kinds, strict=True):
        rate_of = "deterministic" if kind == "likelihood" else kind
        group["lr"] = group["lr"] * factors.get(rate_of, 1.0)
        # The prior is in the objective, and a log-scale that decays towards 0 grows a posterior.
        if kind != "deterministic" and group.get("weight_decay"):
            group["weight_decay"] = 0.0
    return optimizer


def _call_args(arguments: Callable[..., Any], name: str) -> dict[str, Any]:
    """Call Pyro's function of a parameter's name, or of its module's name and its own."""
    if len(inspect.signature(arguments).parameters) == 1:
        return dict(arguments(name))
    module, _, own = name.rpartition(".")
    return dict(arguments(module, own))


def scheduler_of(optim: Any, parameters: Named) -> Any:
    """Return the torch scheduler that is given, or that a Pyro scheduler holds, or None."""
    if isinstance(optim, PyroLRScheduler):
        return optim.optim_objs.get(next(iter(parameters.values())))
    return optim if isinstance(optim, LRScheduler) else None


def make_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return a torch scheduler of an optimiser, from its class, a partial of it, or itself.

    Raises:
        TypeError: something else.
        ValueError: a scheduler of another optimiser, or one that gives groups of different rates
            the same.
    """
    if isinstance(scheduler, LRScheduler):
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                "scheduler is of another optimiser than the fit's: pass its class or a "
                "functools.partial, or pass its optimiser as optim too"
            )
        return scheduler
    expected = "a class of torch.optim.lr_scheduler or a functools.partial of one"
    groups = optimizer.param_groups
    rates, before = {group.get("initial_lr", group["lr"]) for group in groups}, [*map(dict, groups)]
    found = check.one_of("scheduler", scheduler, Callable, expected)(optimizer)
    if len({group.get("initial_lr", group["lr"]) for group in groups}) < len(rates):
        for group, own in zip(groups, before, strict=True):
            group.clear()
            group.update(own)
        raise ValueError(
            f"{type(found).__name__} replaces the rates of groups, which are those of "
            f"lr_multipliers or the optimiser's own, by equal ones: pass it {len(groups)} of them "
            "as a list, which differ as these do, or take a scheduler that multiplies rates"
        )
    return check.one_of("what scheduler returns", found, LRScheduler, "a torch scheduler")


def pyro_clipping(optim: Any) -> Callable[[Iterable[Tensor]], None] | None:
    """Return the gradient clipping that a Pyro optimiser asks for, parameter by parameter."""
    options = optim.pt_clip_args if isinstance(optim, PyroOptim) else None
    if not options:
        return None
    check.one_of("clip_args", options, Mapping, "a dictionary, the same for all parameters")

    def clip(parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(parameter, options["clip_norm"])
            if "clip_value" in options:
                nn.utils.clip_grad_value_(parameter, options["clip_value"])

    return clip
