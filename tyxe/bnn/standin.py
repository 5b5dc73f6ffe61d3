"""Stand-ins: a net's own structure with other tensors in its parameters' places, for one forward.

A forward never changes the net of a BNN. It runs on copies of the net's modules, which are made for
this forward and let go with its graph. What the forward leaves behind goes back to the net.
"""

from __future__ import annotations

import copy
import gc
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.poutine.draw import Draw, draws_are_lazy
from tyxe.poutine.linear_map import watched_forward
from tyxe.predictive.forwards import Statistics
from tyxe.rng import torch_rng
from tyxe.threads import exclusive
from tyxe.util import SITE_PRIORS, Inputs, call_with

# Tensors by the `id` of the parameter or buffer whose place they take.
Tensors = Mapping[int, Tensor]
# Of parts of a net: whether they are in train mode.
Modes = Mapping[nn.Module, bool]
# Of parts of a net: the names of some attributes.
Names = dict[nn.Module, set[str]]

# A module has these besides its other attributes, and a stand-in's modules have their own.
_TREE = ("_parameters", "_modules", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What a copy shares, whatever it refers to.
_ATOMIC = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.FrameType,
    weakref.ref,
    str,
    Tensor,
    torch.fx.Graph,
    torch.jit.ScriptModule,
    torch.optim.Optimizer,
)


class Outline:
    """What stand-ins of a net need to know of it.

    Parts of a net may reach each other by attributes, outside the tree of submodules: by a list of
    layers, a stored bound method, the flat weights of a recurrent layer or a hook. A copy of the
    parts alone would leave these with the originals, so that they are copied as well.
    """

    def __init__(self, net: nn.Module) -> None:
        # Names of such attributes by part, and by `id` what they hold that refers to no part.
        self.links: Names = {}
        self.shared: dict[int, Any] = {}
        # Whether a part may reach itself, so that only the garbage collector frees it.
        self.is_cyclic = False
        # How often a part was seen to have changed otherwise than by a forward.
        self.version = 0
        # Whether a forward draws numbers, by the modes of the parts.
        self.is_random: dict[Any, bool] = {}
        # Modes in which handlers have looked for derivatives inside of a forward.
        self.watched: set[bool] = set()
        self._net = net
        self._seen: dict[nn.Module, dict[str, Any]] = {}
        # What attributes that may be changed in place hold, by part and name.
        self._contents: dict[nn.Module, dict[str, tuple[int, ...]]] = {}
        self._look(net.modules())

    def follow(self, part: nn.Module, by_forward: bool = False) -> None:
        """Look at what has come to a part since the last look."""
        seen = self._seen.get(part)
        if seen is None or not _is_same(seen, part.__dict__) or self.filled(part):
            if not by_forward:
                self.version += 1
                self.is_random = {}  # such as by a rate of dropout that was zero
            self._look([part])

    def filled(self, part: nn.Module) -> list[str]:
        """Return the attributes whose contents were changed in place since the last look."""
        own, contents = part.__dict__, self._contents.get(part, {})
        return [n for n, held in contents.items() if n in own and _held_by(own[n]) != held]

    def _look(self, parts: Iterable[nn.Module]) -> None:
        own = self._net.modules()
        targets = {id(one) for part in own for one in (part, *tensors_of(part))}
        for part in parts:
            seen, contents = self._seen.get(part, {}), self._contents.get(part, {})
            self._seen[part] = now = dict(part.__dict__)
            self._contents[part] = {}
            if is_compiled(part) or isinstance(part, torch.jit.ScriptModule):
                continue
            for name, value in now.items():
                if name in _NOT_LINKS or not gc.is_tracked(value):
                    continue
                if name not in _OF_MODULES and not isinstance(value, (nn.Module, *_ATOMIC)):
                    self._contents[part][name] = _held_by(value)
                known = self._contents[part].get(name) == contents.get(name)
                if not known or name not in seen or seen[name] is not value:
                    self._look_at(part, name, value, targets)

    def _look_at(self, part: nn.Module, name: str, value: Any, targets: set[int]) -> None:
        """Take note of an attribute if its value leads to targets, given by `id`."""
        leading, shared, met = _leading(value, targets)
        links = self.links.setdefault(part, set())
        if leading:
            links.add(name)
            self.shared |= shared
            self.is_cyclic |= any(isinstance(one, nn.Module) for one in met)
        else:
            links.discard(name)
        if not links:
            del self.links[part]


def tensors_of(part: nn.Module) -> Iterator[Tensor]:
    """Yield a part's own parameters and buffers."""
    own = (*part._parameters.values(), *part._buffers.values())
    return (tensor for tensor in own if tensor is not None)


_NOT_LINKS = {*_TREE, SITE_PRIORS}
_OF_MODULES = {*nn.Module().__dict__}
# Of larger contents no more is looked at, which would take longer than the forward.
_MOST_CONTENTS = 1000


def _reached(value: Any, ends: tuple[type, ...]) -> Iterator[Any]:
    """Yield what a value leads to by any number of steps, each once; nothing beyond some types."""
    found: dict[int, Any] = {}  # which keeps them, or others could have their ids
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            yield one
            if not isinstance(one, ends):
                waiting += gc.get_referents(one)


def _held_by(value: Any) -> tuple[int, ...]:
    """Return the `id`s of what a value leads to, but not through modules, in their order."""
    return tuple(map(id, islice(_reached(value, (nn.Module, *_ATOMIC)), _MOST_CONTENTS)))


def _leading(value: Any, targets: set[int]) -> tuple[bool, dict[int, Any], list[Any]]:
    """Return whether a value leads to targets, what on the way does not, and the targets met."""
    found: dict[int, Any] = {}
    referring: dict[int, list[int]] = {}
    met, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        found[id(one)] = one
        if id(one) in targets:
            met.append(one)
        elif not isinstance(one, _ATOMIC):
            for other in gc.get_referents(one):
                referring.setdefault(id(other), []).append(id(one))
                waiting.append(other)
    leading: set[int] = set()
    behind = [id(one) for one in met]
    while behind:
        one_id = behind.pop()
        if one_id not in leading:
            leading.add(one_id)
            behind += referring.get(one_id, [])
    beside = {
        key: one
        for key, one in found.items()
        if key not in leading and not leading.isdisjoint(referring.get(key, ()))
    }
    return id(value) in leading, beside, met


def detached_copies(module: nn.Module) -> dict[int, Any]:
    """Return copies of tensors of a graph that a module keeps, such as features of its forward.

    Where they are in the memo, by their `id`, `copy.deepcopy` takes them; it copies leaves only.
    """
    found: dict[int, Any] = {}
    for one in _tensors_in(_reached(module, _ATOMIC)):
        # A wrapper of a transform that has ended cannot be asked.
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(one)
        if not wrapped and not isinstance(one, Draw) and not one.is_leaf:
            found[id(one)] = one.detach().clone()
    return found


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    return (one for one in values if isinstance(one, Tensor))


class StandIn:
    """Copies of a net's modules, which share all with them but what is given here.

    Buffers are the net's own, in its own dictionaries, so that running statistics arrive there,
    unless `statistics` replaces those of some parts, or `tensors` has them all. A compiled module
    runs uncompiled, since each new object would be compiled anew. A scripted one is the net's own.
    """

    def __init__(
        self,
        net: nn.Module,
        outline: Outline,
        tensors: Tensors,
        modes: Modes | None = None,
        statistics: Statistics | None = None,
        has_buffers: bool = False,
    ) -> None:
        self._outline, self._tensors, self._modes = outline, tensors, modes
        self._has_buffers = has_buffers
        self._twins: dict[nn.Module, nn.Module] = {}
        self._scripted: dict[nn.Module, nn.Module] = {}
        self._statistics: Statistics = {}
        self._recurrent: list[nn.Module] = []
        self.has_left = False  # whether a forward has left something to the net
        self.net = self._twin_of(net)
        self._finish(statistics)
        self._release = _Release(self._twins.values()) if outline.is_cyclic else None

    def part(self, original: nn.Module) -> nn.Module:
        """Return the copy of a part of the net."""
        return self._twins[original] if original in self._twins else self._scripted[original]

    def modes_by(self, change: Callable[[nn.Module], Any]) -> dict[nn.Module, bool]:
        """Return the modes of the net's parts after a function has changed those of the copy."""
        # Scripted parts are the net's own.
        blank = {part: nn.Module() for part in self._scripted}
        for part, twin in self._twins.items():
            places = part._modules.items()
            twin._modules.update({n: blank[child] for n, child in places if child in blank})
        twins = {**self._twins, **blank}
        change(blank.get(self.net, self.net))
        return {part: twin.training for part, twin in twins.items()}

    def attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of the copies as they are now."""
        return [dict(twin.__dict__) for twin in self._twins.values()]

    def remove_remade(self, before: list[dict[str, Any]]) -> Names:
        """Remove attributes of the copies that are other objects than before; return their names.

        They are by part of the net.
        """
        removed: Names = {}
        for (part, twin), own in zip(self._twins.items(), before, strict=True):
            for name, _ in [*_changes(own, twin.__dict__)]:
                twin.__dict__.pop(name, None)
                removed.setdefault(part, set()).add(name)
        return removed

    def put(self, tensors: Tensors, statistics: Statistics | None = None) -> None:
        """Put other tensors in the places of the same parameters, for the next forward.

        The graph of an earlier forward must be done with, of which a part may run again.
        """
        self._tensors = tensors
        for original, twin in self._twins.items():
            for name, own in original._parameters.items():
                if id(own) in tensors:
                    twin._parameters[name] = tensors[id(own)]  # type: ignore[assignment]
        self._finish(statistics)

    def _finish(self, statistics: Statistics | None) -> None:
        self._follow_links()
        if statistics or self._statistics:
            self._put_statistics(statistics or {})

    def __call__(
        self, inputs: Inputs, through: Callable[[Any], Any] | None = None, **keywords: Any
    ) -> Any:
        """Return the net's output on a batch; `through` runs the forward that it is given."""
        forward = partial(call_with, partial(self.net, **keywords), inputs)
        return self._run(forward if through is None else partial(through, forward))

    def call_plainly(self, inputs: Inputs, through: Callable[[Any], Any] | None) -> Any:
        """Return what a call does, of a net that draws no numbers and leaves nothing to the net."""
        forward = partial(call_with, self.net, inputs)
        return forward() if through is None else through(forward)

    def call_apart(self, inputs: Inputs, **keywords: Any) -> Any:
        """Return the net's output on a batch, and leave nothing of the forward to the net."""
        self._prepare_backward()
        output = call_with(partial(self.net, **keywords), inputs)
        self._leave_contents()
        return output

    def call(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for its arguments."""
        return self._run(lambda: self.net(*inputs, **kwargs))

    @property
    def _key(self) -> tuple[bool, ...]:
        return tuple(twin.training for twin in self._twins.values())

    @property
    def is_random(self) -> bool | None:
        """Whether a forward draws random numbers; None where there has been none yet."""
        return self._outline.is_random.get(self._key)

    def _prepare_backward(self) -> None:
        """Let recurrent parts in eval mode be in train mode without dropout, which is the same.

        On a GPU cuDNN keeps nothing for a backward in eval mode.
        """
        for twin in self._recurrent:
            if not twin.training:
                twin.__dict__.update(training=True, dropout=0.0)

    def _run(self, forward: Callable[[], Any]) -> Any:
        self._prepare_backward()
        before = [tuple(map(dict, _state_of(twin))) for twin in self._twins.values()]
        lazy, mode = draws_are_lazy(), self.net.training
        modes = self._key
        is_random = True if lazy else self._outline.is_random.get(modes)
        watch = lazy and mode not in self._outline.watched
        # What may draw numbers lets no other thread draw meanwhile.
        locked = nullcontext() if is_random is False else exclusive()
        with locked, watched_forward() if watch else nullcontext():
            numbers = torch_rng() if is_random is None else None
            output = forward()
            if watch:
                self._outline.watched.add(mode)
            if numbers is not None:
                same = all(map(torch.equal, numbers, torch_rng()))
                self._outline.is_random[modes] = not same
        left = [*self._leave_behind(before), *self._leave_contents()]
        if self._release is not None:
            self._release.stay_with((output, left))
        return output

    # ------------------------------------------------------------------ copies

    def _twin_of(self, part: nn.Module) -> nn.Module:
        if part in self._twins:
            return self._twins[part]
        if isinstance(part, torch.jit.ScriptModule):
            return self._scripted.setdefault(part, self._in_mode(part))
        self._outline.follow(part)
        twin = object.__new__(type(part))
        self._twins[part] = twin
        attributes = part.__dict__.copy()
        get = self._tensors.get
        attributes["_parameters"] = {n: get(id(p), p) for n, p in part._parameters.items()}
        attributes["_modules"] = {
            name: None if child is None else self._twin_of(child)
            for name, child in part._modules.items()
        }
        if self._has_buffers:
            attributes["_buffers"] = {n: get(id(b), b) for n, b in part._buffers.items()}
        if self._modes is not None:
            attributes["training"] = self._modes.get(part, part.training)
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
        if is_compiled(part):
            attributes["forward"] = attributes["_modules"]["_orig_mod"]
        object.__setattr__(twin, "__dict__", attributes)
        if isinstance(twin, nn.RNNBase):
            self._recurrent.append(twin)
        return twin

    def _in_mode(self, part: nn.Module) -> nn.Module:
        """Return a scripted part itself, or a copy where it is to be in another mode."""
        mode = part.training if self._modes is None else self._modes.get(part, part.training)
        same = all(one.training == mode for one in part.modules())
        return part if same else copy.deepcopy(part).train(mode)

    def _follow_links(self) -> None:
        """Let attributes that lead to parts of the net lead to their copies."""
        # Copies, since another thread may follow a change.
        links = dict(self._outline.links)
        of = {part: {*names} for part, names in links.items() if part in self._twins}
        if of:
            held = (t for part in self._twins for t in tensors_of(part))
            memo = {**self._outline.shared, **{id(t): t for t in held}, **self._tensors}
            memo |= {id(part): twin for part, twin in self._twins.items()}
            for part, names in of.items():
                twin = self._twins[part]
                for name in names & part.__dict__.keys():
                    twin.__dict__[name] = copy.deepcopy(part.__dict__[name], memo)
        for part, twin in self._twins.items():
            for name in _HOOKS:
                hooks = part.__dict__.get(name)
                if hooks and name not in of.get(part, ()):
                    self._follow_hooks(twin, name, hooks)

    def _follow_hooks(self, twin: nn.Module, name: str, hooks: Any) -> None:
        """Bind hooks that are methods of a part, and came after the look at it, to the copy."""
        if any(getattr(hook, "__self__", None) in self._twins for hook in hooks.values()):
            twin.__dict__[name] = bound = copy.copy(hooks)
            for key, hook in hooks.items():
                owner = getattr(hook, "__self__", None)
                if owner in self._twins:
                    bound[key] = types.MethodType(hook.__func__, self._twins[owner])

    def _put_statistics(self, statistics: Statistics) -> None:
        for part in self._statistics:
            self._twins[part].__dict__["_buffers"] = part._buffers
        for part, buffers in statistics.items():
            self._twins[part].__dict__["_buffers"] = {**part._buffers, **buffers}
        self._statistics = statistics

    # ------------------------------------------------------------------ after a forward

    def _leave_behind(self, before: list[_State]) -> list[Any]:
        """Give the net what a forward has set on its copies, and return the values."""
        left: list[Any] = []
        for (part, twin), own in zip(self._twins.items(), before, strict=True):
            if not all(map(_is_same, own, _state_of(twin))):
                self.has_left = True
                left += self._hand_over(part, twin, own)
                self._outline.follow(part, by_forward=True)
        return left

    def _leave_contents(self) -> list[Any]:
        """Put parts in the places of copies in what the net holds, and return what has changed."""
        left = []
        for part, twin in self._twins.items():
            filled = self._outline.filled(part)
            self.has_left |= bool(filled)
            for name in filled:
                value = part.__dict__[name]
                if value is twin.__dict__.get(name):
                    part.__dict__[name] = self._of_original(value)
                    left.append(value)
            if filled:
                self._outline.follow(part, by_forward=True)
        return left

    def _hand_over(self, part: nn.Module, twin: nn.Module, before: _State) -> Iterator[Any]:
        attributes, *trees = before
        for name, value in _changes(attributes, twin.__dict__):
            if name in _TREE or (name == "training" and self._modes is not None):
                continue
            if value is _GONE:
                part.__dict__.pop(name, None)
            else:
                part.__dict__[name] = self._of_original(value)
                yield value
        originals = {id(twin): part for part, twin in self._twins.items()}
        own: tuple[dict[str, Any], ...] = part._parameters, part._modules
        for tree, kept, here in zip(own, trees, _state_of(twin)[1:], strict=True):
            for name, value in _changes(kept, here):
                if value is _GONE:
                    tree.pop(name, None)
                else:
                    tree[name] = originals.get(id(value), value)

    def _of_original(self, value: Any) -> Any:
        """Return an attribute's value with parts of the net in the places of their copies."""
        own: dict[int, Any] = {id(twin): original for original, twin in self._twins.items()}
        held = (p for original in self._twins for p in original._parameters.values())
        own |= {id(self._tensors[id(p)]): p for p in held if id(p) in self._tensors}
        leading, shared, _ = _leading(value, {*own})
        if not leading:
            return value
        return copy.deepcopy(value, {**shared, **own})


# Attributes, parameters and submodules of a module.
_State = tuple[dict[str, Any], ...]
_GONE = object()


def _state_of(module: nn.Module) -> _State:
    return module.__dict__, module._parameters, module._modules


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two dictionaries hold the same objects, in the same order."""
    same = [*one] == [*other]
    return same and all(map(operator.is_, one.values(), other.values()))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names under which other objects are now, or none any more."""
    for name in [*before, *(name for name in now if name not in before)]:
        value = now.get(name, _GONE)
        if name not in before or value is not before[name]:
            yield name, value


_RELEASE = "tyxe.bnn.standin"


class _Release:
    """Empties modules, which may hold themselves, when it is let go itself.

    That is when neither the stand-in nor the graph of what it has returned or left is there any
    more. Where gradients are recorded and no graph is found, it is the garbage collector's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*map(weakref.ref, modules)]

    def stay_with(self, values: Any) -> None:
        """Stay as long as the graphs of the tensors that values hold, in containers of any kind."""
        tensors = _tensors_in(_reached(values, (nn.Module, *_ATOMIC)))
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        for node in nodes:
            kept: Any = node.metadata
            kept[_RELEASE] = self, kept.get(_RELEASE)  # of another's output that goes through
        if not nodes and torch.is_grad_enabled():
            self._modules = []

    def __del__(self) -> None:
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.__dict__.clear()


def is_compiled(part: nn.Module) -> bool:
    """Whether a module is what `torch.compile` returns."""
    # By name, since its class is in a part of PyTorch that takes seconds to import.
    return type(part).__name__ == "OptimizedModule" and "_orig_mod" in part._modules


# --------------------------------------------------------------------------- modes

# The modes in which nets of BNNs run: those of a task or thread, the innermost last.
_MODES: ContextVar[tuple[tuple[Any, Modes | None], ...]] = ContextVar("_MODES", default=())


@contextmanager
def in_modes(bnn: Any, modes: Modes | None) -> Iterator[None]:
    """Let stand-ins of a BNN's net be in these modes until the end; None is for the net's own."""
    token = _MODES.set((*_MODES.get(), (bnn.net, modes)))
    try:
        yield
    finally:
        _MODES.reset(token)


def modes_of(bnn: Any) -> Modes | None:
    """Return the modes in which a BNN's net is to run here, or None for its own."""
    return next((modes for one, modes in reversed(_MODES.get()) if one is bnn.net), None)
