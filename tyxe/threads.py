"""Threads and tasks: a stack of handlers for each, and one lock for what the process has once.

Pyro keeps the stack of active handlers, and the dimensions of plates, in lists of the process.
Importing this module gives every task of an event loop, and every thread, lists of its own, so
that a handler that one has entered neither acts in another nor is taken off by it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import pyro
import torch
from pyro.poutine import collapse_messenger, messenger, runtime
from pyro.poutine.messenger import Messenger
from torch.utils._python_dispatch import _pop_mode

from tyxe.errors import UNREAD


class _Own(MutableSequence[Any]):
    """A list of which every task and every thread has its own."""

    def __init__(self, name: str, items: Sequence[Any]) -> None:
        self.items: ContextVar[tuple[Any, ...]] = ContextVar(name, default=tuple(items))

    def __getitem__(self, index: Any) -> Any:
        return self.items.get()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        changed = list(self.items.get())
        changed[index] = value
        self.items.set(tuple(changed))

    def __delitem__(self, index: Any) -> None:
        changed = list(self.items.get())
        del changed[index]
        self.items.set(tuple(changed))

    def insert(self, index: int, value: Any) -> None:
        before = self.items.get()
        self.items.set((*before[:index], value, *before[index:]))

    def __len__(self) -> int:
        return len(self.items.get())


def _of_its_own(module: Any, name: str, holders: Sequence[Any]) -> _Own:
    """Put an own list in the place of one of Pyro's, unless an earlier import has done so."""
    found = getattr(module, name)
    own = found if isinstance(found, _Own) else _Own(name, found)
    for holder in holders:
        setattr(holder, name, own)
    return own


_HANDLERS = _of_its_own(runtime, "_PYRO_STACK", (runtime, messenger, collapse_messenger))
_PLATES = _of_its_own(runtime._DIM_ALLOCATOR, "_stack", (runtime._DIM_ALLOCATOR,))


def handlers() -> list[Messenger]:
    """Return the handlers that are active in this task or thread, the outermost first."""
    return [*_HANDLERS]


@contextmanager
def only_handlers(active: Sequence[Messenger]) -> Iterator[None]:
    """Let just these handlers be active in this task or thread."""
    token = _HANDLERS.items.set(tuple(active))
    try:
        yield
    finally:
        _HANDLERS.items.reset(token)


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_engine() -> bool:
    """Whether this thread is one of autograd's engine, which runs a backward for another."""
    # Threads that Python has not started have a substitute object.
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A fork waits, because its process would find what another thread has half changed.
    os.register_at_fork(
        before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
    )


def exclusive() -> AbstractContextManager[Any]:
    """Let no other thread in while what the process has once is changed; a thread may nest it."""
    return _LOCK


class _Settings:
    """Settings of Pyro's, which belong to the process, for as long as any thread is inside."""

    def __init__(self, **values: Any) -> None:
        self._values = values
        self._before: dict[str, Any] = {}
        self._depths: dict[int, int] = {}  # of threads that are inside

    @contextmanager
    def __call__(self) -> Iterator[None]:
        depth = self.depth()
        try:
            with _LOCK:
                if not self._depths:
                    self._before = {name: pyro.settings.get(name) for name in self._values}
                self._depths[threading.get_ident()] = depth + 1
                pyro.settings.set(**self._values)
            yield
        finally:
            self.go_back(depth)

    def depth(self) -> int:
        """Return how often this thread is inside."""
        return self._depths.get(threading.get_ident(), 0)

    def go_back(self, depth: int) -> None:
        """Let this thread be inside so often, of which nothing may be left to do."""
        with _LOCK:
            if depth:
                self._depths[threading.get_ident()] = depth
            else:
                self._depths.pop(threading.get_ident(), None)
            if self._before and not self._depths:
                pyro.settings.set(**self._before)
                self._before = {}


_VALIDATION = _Settings(
    validate_distributions_pyro=False,
    validate_distributions_torch=False,
    validate_infer=False,
    validate_poutine=False,
)
# Parameters of Pyro's modules are their own, and not in Pyro's global store.
module_local_params = _Settings(module_local_params=True)


@contextmanager
def unvalidated(active: bool = True) -> Iterator[None]:
    """Read no numbers, for which the host would wait, to validate distributions and operators.

    What would be an error is then NaN or infinite. This is for steps whose loss is looked at.
    """
    token = UNREAD.set(active)
    try:
        with _VALIDATION() if active else nullcontext():
            yield
    finally:
        UNREAD.reset(token)


class as_before(ContextDecorator):
    """At the end, set back what something inside could not, because a Ctrl-C came in between."""

    def _recreate_cm(self) -> as_before:
        return as_before()  # a decorated function may run in several threads

    def __enter__(self) -> None:
        """Take note of what is active."""
        self._modes = torch._C._len_torch_dispatch_stack()
        self._active, self._plates = _HANDLERS.items.get(), _PLATES.items.get()
        self._gradients, self._unread = torch.is_grad_enabled(), UNREAD.get()
        self._depths = {each: each.depth() for each in (_VALIDATION, module_local_params)}

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None
    ) -> None:
        """Set it back, unless this is in a context that is let go without an end, and too late."""
        if kind is GeneratorExit:
            return
        _close_entered(traceback)
        _HANDLERS.items.set(self._active)
        _PLATES.items.set(self._plates)
        torch.set_grad_enabled(self._gradients)
        UNREAD.set(self._unread)
        while torch._C._len_torch_dispatch_stack() > self._modes:
            _pop_mode()
        for each, depth in self._depths.items():
            each.go_back(depth)


def _close_entered(traceback: TracebackType | None) -> None:
    """Close contexts that an error has left open, where it came as they were entered or left.

    They would end with the traceback that holds them, and set back what has changed until then.
    """
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in _ENDS_OF_GENERATORS:
            frame.f_locals["self"].gen.close()
        elif frame.f_code in _ENDS_OF_INFERENCE_MODE:
            # Without the guard, the error came before there was one.
            guard = getattr(frame.f_locals["self"], "_inference_mode_context", None)
            if guard is not None:
                guard.__exit__(None, None, None)
        traceback = traceback.tb_next


def _ends(kind: type[Any]) -> set[Any]:
    """Return the code by which a kind of contexts is entered, and that by which it is left."""
    return {kind.__enter__.__code__, kind.__exit__.__code__}


_ENDS_OF_GENERATORS = _ends(type(only_handlers(())))  # of contexts by `contextmanager`
_ENDS_OF_INFERENCE_MODE = _ends(torch.inference_mode)
