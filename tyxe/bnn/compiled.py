"""Steps of a fit as compiled programs, which outlive it, and what these depend on."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_leaves

from tyxe.autocast import is_close
from tyxe.bnn.base import BNN
from tyxe.bnn.elbo import ElboTerms, Objective
from tyxe.bnn.standin import Names, Outline, StandIn, modes_of
from tyxe.errors import warn
from tyxe.poutine.draw import draws_are_lazy
from tyxe.program import Program, Programs, check_equal, dense, has_programs, is_dense
from tyxe.rng import by_generators, set_torch_rng, torch_rng, torch_rng_kept
from tyxe.threads import handlers, unvalidated
from tyxe.util import Inputs, is_plain, kind_of_batch, named_tensors, same_numbers

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.memory_format,
    types.BuiltinFunctionType,
    types.ModuleType,
)
_CONTAINERS = {dict, OrderedDict, list, tuple, set}
# Of objects of this package: past fits, and what is made anew of what a program is given.
_OF_FITS = {"optimizer", "_scheduler", "_pending", "_epochs_done", "_stage", "_chosen_prior"}
_OF_FITS |= {"_mean_weight", "_best", "_due"}
_LEFT_OUT = {*_OF_FITS, "_runtime", "prior", "terms", "_built"}


class _Same:
    """An object that is equal to itself alone, in the state that a version tells."""

    def __init__(self, one: Any, version: int = 0) -> None:
        self.one, self.version = one, version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return self.one is other.one and self.version == other.version

    def __hash__(self) -> int:
        return id(self.one)


def fingerprint(
    objective: Any, handlers: Iterable[Messenger], autocast: torch.dtype | None, remade: Names
) -> Any:
    """Return what a program of an objective depends on besides the tensors that it is given.

    These are parameters and buffers, of which it has shapes, types and where two are one. Of other
    tensors it has the object and its version. Attributes that each forward makes anew are left out.
    """
    given = {id(t) for t in (*objective.parameters(), *objective.buffers())}
    described = Description(given, left_out=remade)
    return (
        described(objective),
        [described(configuration(handler)) for handler in handlers],
        autocast,
        described(dict(global_hooks._global_forward_hooks)),
        described(dict(global_hooks._global_forward_pre_hooks)),
    )


def configuration(handler: Messenger) -> Any:
    """Return what the answers of a handler depend on: all that it holds, or what it says itself."""
    own = getattr(handler, "configuration", None)
    return (type(handler), vars(handler) if own is None else own)


class _Numbers(_Same):
    """A tensor in the state that a version tells, or another one of the same numbers."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Numbers) or self.one is other.one:
            return super().__eq__(other)
        return _is_alike(self.one, other.one)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    # On other devices, sums of the same numbers may differ.
    rounded = one.device.type != "cpu" and one.is_floating_point()
    return is_close(one, other) if rounded else same_numbers(one, other)


class Description:
    """Describes objects by plain values that can be compared, each object once.

    Tensors besides those given are equal to themselves alone, or to those of the same numbers.
    Attributes of modules in `left_out` are not described.
    """

    def __init__(
        self, given: set[int], by_numbers: bool = False, left_out: Names | None = None
    ) -> None:
        self._given, self._by_numbers, self._left_out = given, by_numbers, left_out or {}
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []  # or others could have their ids

    def __call__(self, one: Any) -> Any:
        # A module has many of these, as for its hooks.
        kind = type(one)
        if kind in _CONTAINERS and not one:
            return kind
        if kind is str or isinstance(one, _PLAIN):
            return (kind.__name__, one)
        if id(one) in self._known:
            return ("known", self._known[id(one)])
        self._known[id(one)] = len(self._known)
        self._kept.append(one)
        return self._of(one)

    def _of(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            return self._of_tensor(one)
        if isinstance(one, weakref.ref):
            # Recurrent layers have some to the draws of their latest forward.
            held = one()
            return (type(one), self(None if isinstance(held, Tensor) else held))
        library = _library_of(one)
        if library in _OF_PROCESS:
            return _Same(one)
        if isinstance(one, Mapping):
            # Of a copy, since another thread's forward may fill it meanwhile.
            return (type(one), [(self(key), self(value)) for key, value in [*one.items()]])
        if isinstance(one, list | tuple | set | frozenset | deque):
            return (type(one), [self(item) for item in [*one]])
        if isinstance(one, types.MethodType):
            return (_Same(one.__func__), self(one.__self__))
        if isinstance(one, types.FunctionType):
            cells = [self(_content_of(cell)) for cell in one.__closure__ or ()]
            return (_Same(one), cells, self(one.__defaults__), self(one.__kwdefaults__))
        if isinstance(one, functools.partial):
            return (type(one), self(one.func), self(one.args), self(one.keywords))
        if isinstance(one, np.ndarray | np.generic):
            return (type(one), one.shape, one.dtype, one.tobytes())
        own, of_class = _attributes_of(one), _attributes_of_class(type(one))
        if library == "tyxe" or isinstance(one, BNN):  # a user's class of a BNN as well
            own = {name: value for name, value in own.items() if name not in _LEFT_OUT}
        if isinstance(one, nn.Module) and one in self._left_out:
            own = {n: value for n, value in own.items() if n not in self._left_out[one]}
        held = [(name, self(value)) for name, value in (of_class | own).items()]
        # What holds nothing that Python sees, such as a decimal number, may still be another.
        return (type(one) if own else _Same(one), held)

    def _of_tensor(self, tensor: Tensor) -> Any:
        kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        if id(tensor) in self._given:
            return kind
        state = _Numbers if self._by_numbers else _Same
        return (*kind, state(tensor, 0 if tensor.is_inference() else tensor._version))


def _library_of(one: Any) -> str:
    return type(one).__module__.partition(".")[0]


def _attributes_of(one: Any) -> dict[str, Any]:
    slots = [name for kind in type(one).__mro__ for name in _slots_of(kind) if hasattr(one, name)]
    return {name: getattr(one, name) for name in slots} | getattr(one, "__dict__", {})


def _attributes_of_class(own: type) -> dict[str, Any]:
    """Return the attributes of a class and its parents, of those that are a user's."""
    kinds = [k for k in reversed(own.__mro__) if k.__module__.partition(".")[0] not in _LIBRARIES]
    return {n: v for kind in kinds for n, v in vars(kind).items() if n not in _OF_CLASSES}


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


_LIBRARIES = {"builtins", "torch", "pyro", "tyxe", "numpy", "collections", "abc", "typing"}
# Their objects lead to others of the process, as a logger to all loggers.
_OF_PROCESS = {"logging", "threading", "weakref", "_weakrefset", "asyncio", "multiprocessing"}
_OF_CLASSES = {*vars(type("Plain", (), {})), "__annotations__", "_abc_impl"}


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def compiled_steps(objective: Objective, autocast: torch.dtype | None) -> CompiledSteps:
    """Return the compiled steps of a BNN: those of its last fit, where nothing has changed."""
    runtime = objective.bnn._runtime
    if runtime.steps is None or not runtime.steps.are_of(objective, autocast):
        runtime.steps = CompiledSteps(objective, autocast)
    found: CompiledSteps = runtime.steps
    found.programs.begin()
    return found


class CompiledSteps:
    """Terms and gradients of an objective as compiled programs, one for each kind of batch.

    What runs in Python runs once, and what it did to tensors, backward included, is the program.
    For a seed it draws the numbers that it drew uncompiled.
    """

    def __init__(self, objective: Objective, autocast: torch.dtype | None) -> None:
        self._autocast = autocast
        self._remade: Names = {}  # attributes that each forward makes anew
        self._fingerprint = fingerprint(objective, handlers(), autocast, self._remade)
        device = next(objective.parameters()).device
        self.programs, self._exist = Programs("steps"), has_programs(device)
        if not self._exist:
            warn("compile=True needs a C++ compiler, and none is found: steps run uncompiled")

    @property
    def are_none(self) -> bool:
        """Whether nothing can be a program, or nothing that was asked for so far is one."""
        return not self._exist or self.programs.are_none

    def are_of(self, objective: Objective, autocast: torch.dtype | None) -> bool:
        """Whether nothing has changed that is fixed in the programs."""
        now = fingerprint(objective, handlers(), autocast, self._remade)
        return bool(self._fingerprint == now)

    def __call__(
        self,
        objective: Objective,
        inputs: Inputs,
        targets: Any,
        beta: float,
        load: float | None,
        share: float,
    ) -> ElboTerms | None:
        """Add a share of a batch's gradients and return its terms, or None without a program."""
        found = self.find(objective, inputs, targets, beta, load)
        if found is None:
            return None
        terms, gradients = found()
        for parameter, gradient in zip(found.trained, gradients, strict=True):
            if gradient is not None:
                gradient = gradient if share == 1 else gradient * share
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return terms

    def find(
        self,
        objective: Objective,
        inputs: Inputs,
        targets: Any,
        beta: float,
        load: float | None = None,
    ) -> CompiledStep | None:
        """Return the step of a batch, or None without a program."""
        batch = tree_leaves((inputs, targets))
        if not self._exist:
            return None
        tensors = tensors_of(objective.bnn)
        trained = {name: t for name, t in tensors.items() if t.requires_grad}
        others = {name: t for name, t in tensors.items() if name not in trained}
        weight = factors_of(objective.bnn, beta, [load])[0]
        held = [value.detach() for value in (*trained.values(), *others.values())]
        given = [*held[: len(trained)]], [*held[len(trained) :]], (inputs, targets), weight
        # Other handlers than those of this package may have the weight from elsewhere.
        others_run = any(_library_of(handler) != "tyxe" for handler in handlers())
        key = (kind_of_batch((inputs, targets)), beta if others_run else None)

        def make() -> Program:
            check_are_tensors(batch)
            known = sum(map(len, self._remade.values()))
            program = _program(objective, trained, others, given, self._remade)
            _compare(program, objective, [*trained.values()], given)
            # Not of what has changed since, where no more is left out.
            if sum(map(len, self._remade.values())) > known:
                how = handlers(), self._autocast, self._remade
                self._fingerprint = fingerprint(objective, *how)
            return program

        program = self.programs.find(key, make)
        if program is None:
            return None
        return CompiledStep(program, [*trained.values()], held, dense(batch), weight)


class CompiledStep(NamedTuple):
    """A program of a step with all that it is given."""

    program: Program
    trained: list[Tensor]  # the parameters
    held: list[Tensor]  # parameters and other tensors, as the program takes them
    batch: list[Tensor]  # the leaves of inputs and targets
    weight: Tensor  # of the KL, and of the data term

    def __call__(self) -> tuple[ElboTerms, list[Tensor | None]]:
        """Return the terms, and the gradient of each parameter, None where it has none."""
        with by_generators():
            leaves = self.program.at_leaves(*self.held, *self.batch, self.weight)
        data, kl, points, gradients = self.program.returned(leaves)
        return ElboTerms(data, kl, points, {}), gradients


def factors_of(bnn: Any, beta: float, loads: Sequence[float | None]) -> Tensor:
    """Return the factors of KL and data term `(n, 2)`, for the load of each of several batches."""
    like = bnn._like
    dtype = torch.promote_types(like.dtype.to_real(), torch.float32)
    # By fills, since a copy of numbers of the host would make it wait.
    factors = torch.full((len(loads), 2), beta, dtype=dtype, device=like.device)
    for row, load in zip(factors, loads, strict=True):
        row[1].fill_(1.0 if load is None else load)
    return factors


def check_are_tensors(leaves: Iterable[Any]) -> None:
    """Raise a RuntimeError if a program would take numbers of Python or others, as constants."""
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise RuntimeError("not all of its inputs are tensors")


def tensors_of(bnn: Any) -> dict[str, Tensor]:
    """Return parameters and buffers, but not the values in whose places draws are put."""
    sites = bnn._replaced()
    return {name: t for name, t in named_tensors(bnn).items() if id(t) not in sites}


class ObjectiveFunction:
    """An objective as a pure function of some tensors of its BNN, in their order."""

    def __init__(self, objective: Objective, tensors: Iterable[Tensor]) -> None:
        self._objective, self._tensors = objective, [*tensors]
        self._outline, self._modes = Outline(objective), modes_of(objective.bnn)

    def __call__(
        self, values: Sequence[Tensor], batch: Any, factors: Any
    ) -> tuple[Tensor, ElboTerms]:
        """Return the loss and its terms; a forward that replaces a buffer is a RuntimeError.

        `factors` are those of KL and data term.
        """
        return self._run(self._at(values), values, batch, factors)

    def _run(
        self, stand_in: StandIn, values: Sequence[Tensor], batch: Any, factors: Any
    ) -> tuple[Tensor, ElboTerms]:
        twin: Any = stand_in.net
        loss = twin(*batch, *factors)
        known = {*map(id, values)}
        if replaced := [n for n, b in twin.bnn.net.named_buffers() if id(b) not in known]:
            raise RuntimeError(
                f"the forward replaces {', '.join(replaced)}, of which a program keeps nothing: "
                "change buffers in place"
            )
        return loss, twin.take_terms()

    def _at(self, values: Sequence[Tensor]) -> StandIn:
        swapped = {id(own): value for own, value in zip(self._tensors, values, strict=True)}
        return StandIn(self._objective, self._outline, swapped, self._modes, has_buffers=True)

    def what_changes(self, batch: Any, remade: Names) -> str:
        """Say what a second step returns or leaves otherwise, see the function of this name."""
        stand_in, held = self._at(self._tensors), [t.detach() for t in self._tensors]
        trained = [t for t in self._tensors if t.requires_grad]

        def step() -> Tensor:
            loss, _ = self._run(stand_in, self._tensors, batch, [1.0])
            torch.autograd.grad(loss, trained, allow_unused=True)  # for hooks of it
            return loss

        return what_changes(stand_in, step, held, remade)


def what_changes(
    stand_in: StandIn, forward: Callable[[], Tensor], held: Sequence[Tensor], remade: Names
) -> str:
    """Say what a second forward of a stand-in returns or leaves otherwise, if anything.

    What a forward writes into the tensors that are held is undone. Attributes that each forward
    makes anew and does not read before, such as its latest outputs, are added to `remade`.
    """
    net, before = stand_in.net, [t.clone() for t in held]
    given = {id(t) for t in (*net.parameters(), *net.buffers())}

    def run() -> Tensor:
        with torch_rng_kept():
            try:
                return forward().detach()
            finally:
                restore(held, before)

    found, left = run(), Description(given, by_numbers=True)(net)
    states = stand_in.attributes()
    if not _is_alike(found, run()):
        return (
            "its forward depends on what an earlier one has left, or on random numbers that are "
            "not PyTorch's"
        )
    if left != Description(given, by_numbers=True)(net):
        return "its forward changes what the net holds, such as a number of calls"
    names = stand_in.remove_remade(states)
    with suppress(Exception):  # of a forward that reads them
        if names and _is_alike(found, run()):
            for part, own in names.items():
                remade.setdefault(part, set()).update(own)
    return ""


def _program(
    objective: Objective,
    trained: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    given: Any,
    remade: Names,
) -> Program:
    """Return a step as a program of parameters, other tensors, a batch and weights of the terms."""
    own = (*trained.values(), *others.values())
    watched = [n for n, p in trained.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if watched:
        raise RuntimeError(f"hooks of the gradients of {', '.join(watched)} would not run")
    if broken := [t for t in own if not is_dense(t)]:
        raise RuntimeError(
            f"a tensor of shape {tuple(broken[0].shape)} and strides {broken[0].stride()} is part "
            "of a larger one: make parameters and buffers contiguous"
        )
    function = ObjectiveFunction(objective, own)
    if reason := function.what_changes(given[2], remade):
        raise RuntimeError(reason)

    def step(values: list[Tensor], rest: list[Tensor], batch: Any, weight: Tensor) -> Any:
        leaves = [value.detach().requires_grad_() for value in values]
        loss, terms = function([*leaves, *rest], batch, weight.unbind())
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return terms.data.detach(), terms.kl.detach(), terms.points, [*gradients]

    with torch_rng_kept(), unvalidated():
        return Program(step, *given, how="compiled", draws=True)


def _compare(program: Program, objective: Objective, trained: list[Tensor], given: Any) -> None:
    """Raise a RuntimeError if a program's first step is not that of the objective itself.

    Where a handler samples inside the net, numbers are drawn in another order, and only the
    parameters that have gradients are compared.
    """
    values, others, batch, weight = given
    held = [*values, *others]
    with torch_rng_kept():
        numbers, before = torch_rng(), [tensor.clone() for tensor in held]
        try:
            with by_generators():
                data, kl, _, gradients = program(*given)
            set_torch_rng(numbers)
            restore(held, before)
            loss = objective(*batch, *weight)
            expected = torch.autograd.grad(loss, trained, allow_unused=True)
        finally:
            restore(held, before)
    terms = objective.take_terms()
    if [one is None for one in gradients] != [one is None for one in expected]:
        raise RuntimeError("its gradients are of other parameters than those of an eager step")
    if not draws_are_lazy():
        pairs = [*zip(gradients, expected, strict=True), (data, terms.data), (kl, terms.kl)]
        known = [(found, one.detach()) for found, one in pairs if found is not None]
        check_equal("it", is_close, known)


def restore(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Set tensors back to values, those that have changed; not sparse ones."""
    for tensor, value in zip(tensors, values, strict=True):
        # A copy of the same numbers would be a new version, and NaN may fill an expanded tensor.
        if is_plain(tensor) and not same_numbers(tensor, value):
            tensor.copy_(value)
