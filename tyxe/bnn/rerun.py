"""Nets that are run again in the backward: they meet the draws of the forward in question.

Activation checkpoints and adjoint solvers run parts of a net again while autograd goes through the
graph, when the draws no longer stand in the places of the sites. What stands there, a `Resting`
parameter, then answers with the draw of that forward whose outputs the backward came through.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_iter, tree_map

from tyxe.poutine import Draw
from tyxe.threads import in_backward
from tyxe.util import in_function_transform


class Bnn(Protocol):
    """What is needed of a BNN here."""

    def in_places(self) -> dict[str, Tensor]:
        """Return what is in the places of the sites now, by joint name."""
        ...


# The forward that a backward has come to, for each that is running: its parts may run in several of
# autograd's threads.
_REACHED: weakref.WeakValueDictionary[int, _Forward] = weakref.WeakValueDictionary()


class _OfThread(threading.local):
    task = -1


_THREAD = _OfThread()


def _reached() -> _Forward | None:
    """Return the forward that this backward, or the one that it is a part of, has come to."""
    task = torch._C._current_graph_task_id()
    if task not in _REACHED:
        return _REACHED.get(_THREAD.task)
    _THREAD.task = task
    forward = _REACHED[task]
    node = torch._C._current_autograd_node()
    # Older nodes are those of the inputs.
    return None if node is not None and node._sequence_nr() < forward.drawn else forward


def _is_nested() -> bool:
    return torch._C._current_graph_task_id() not in _REACHED and _reached() is not None


def _in_reentrant_checkpoint() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "CheckpointFunctionBackward"


def _left(task: int) -> None:
    _REACHED.pop(task, None)


class _Forward:
    """One forward of a BNN's net, and its draws by joint name."""

    def __init__(self, bnn: Bnn) -> None:
        self.bnn, self.values = bnn, bnn.in_places()
        # To ask a lazy draw for its gradient would draw it.
        made = [value.grad_fn for value in self.values.values() if not isinstance(value, Draw)]
        self.drawn = max((node._sequence_nr() for node in made if node is not None), default=0)
        self._guarded: set[str] = set()

    def enter(self, gradients: Any) -> None:
        """Be the forward that the rest of this backward is about: a hook of the outputs' nodes."""
        task = _THREAD.task = torch._C._current_graph_task_id()
        if task not in _REACHED:
            Variable._execution_engine.queue_callback(partial(_left, task))
        _REACHED[task] = self

    def draw_of(self, resting: Tensor) -> Tensor | None:
        """Return the draw in whose place a parameter rests, or None."""
        name = next((n for n, one in self.bnn.in_places().items() if one is resting), None)
        if name is None:
            return None
        value = self.values[name]
        is_lazy = isinstance(value, Draw)
        if _in_reentrant_checkpoint() and (is_lazy or value.grad_fn is not None):
            raise RuntimeError(REENTRANT)
        if name not in self._guarded and not is_lazy and value.grad_fn is not None:
            self._guarded.add(name)
            value.register_hook(self._guard(_behind(value.grad_fn)))
        return value

    def _guard(self, node: Any) -> Any:
        def check(gradient: Tensor) -> None:
            # A backward inside of the backward, which does not stop at the draw, frees its graph.
            if _is_nested() and torch._C._will_engine_execute_node(node):
                raise RuntimeError(REENTRANT)

        return check


def _behind(node: Any) -> Any:
    """Return a node that a backward goes through after this one, unless it stops here."""
    found = (following for following, _ in node.next_functions if following is not None)
    return next((one for one in found if not hasattr(one, "variable")), node)


REENTRANT = (
    "a part of this net is a reentrant activation checkpoint, whose backward within the backward "
    "goes through the graph of the draws more than once: call "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Resting(nn.Parameter):
    """A site's own value, in its place as long as no draw is there.

    In a backward it stands for the draw of the forward that is being differentiated.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        forward = _reached()
        if forward is not None and in_backward():
            found = [forward.draw_of(one) for one in tree_iter((args, kwargs)) if type(one) is cls]
            if any(draw is not None for draw in found):
                args, kwargs = tree_map(lambda one: _drawn(one, forward), (args, kwargs))
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _drawn(one: Any, forward: _Forward) -> Any:
    draw = forward.draw_of(one) if type(one) is Resting else None
    return one if draw is None else draw


def remember(bnn: Bnn, outputs: Any) -> Any:
    """Return a net's outputs, whose backward finds the draws that are in the sites' places now."""
    if not torch.is_grad_enabled() or in_function_transform():
        return outputs
    forward = None
    if any(_OWNED in node.metadata for node in _nodes(outputs)):
        outputs = tree_map(_own, outputs)
    for node in _nodes(outputs):
        if _OWNED not in node.metadata:
            forward = forward or _Forward(bnn)
            node.metadata[_OWNED] = True
            node.register_prehook(forward.enter)
    return outputs


# The mark of a node that is an output of some BNN's forward.
_OWNED = "tyxe.bnn.rerun"


def _own(one: Any) -> Any:
    """Return a view of a tensor that the net has been given, or has returned before."""
    node: Any = one.grad_fn if isinstance(one, Tensor) else None
    return one if node is None or _OWNED not in node.metadata else one.view_as(one)


def _nodes(outputs: Any) -> Iterator[Any]:
    for one in _leaves(outputs, set()):
        if isinstance(one, Tensor) and one.grad_fn is not None:
            yield one.grad_fn


def _leaves(outputs: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what is in containers and in the attributes of objects, such as of dataclasses."""
    for one in (outputs,) if isinstance(outputs, Tensor) else tree_iter(outputs):
        yield one
        held = None if isinstance(one, Tensor | nn.Module | type) else _attributes(one)
        if held and id(one) not in seen:
            seen.add(id(one))
            yield from _leaves(held, seen)


def _attributes(one: Any) -> list[Any]:
    slots = [name for base in type(one).__mro__ for name in getattr(base, "__slots__", ())]
    return [getattr(one, name, None) for name in (*slots, *getattr(one, "__dict__", ()))]


def draws_of_backward(bnn: Bnn) -> Mapping[str, Tensor] | None:
    """Return the draws that a forward inside of a backward has to use, or None to draw.

    Raises:
        RuntimeError: the backward has not come through an output of this BNN.
    """
    # A checkpoint around the BNN has set the generators back, and counts the tensors of a draw.
    in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if not in_backward() or in_checkpoint:
        return None
    forward = _reached()
    if forward is None or forward.bnn is not bnn:
        raise RuntimeError(
            f"this {type(bnn).__name__} is run again in the backward of a forward that recorded "
            "no gradients, as in odeint_adjoint or a reentrant checkpoint around it, so its draws "
            "are not known: wrap its net instead, or keep forward and backward inside of "
            "`with bnn.hold_sample():`"
        )
    return forward.values
