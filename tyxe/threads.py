"""Several threads: a stack of handlers for each, and one lock for what the process has once.

Pyro keeps the stack of active handlers, and the dimensions of plates, in lists of the process.
Importing this module gives every thread lists of its own, so that a handler that one thread has
entered neither acts in another nor is taken off by it.
"""

from __future__ import annotations

# The functions of `signal`, without the enumerations in which these spend most of their time.
import _signal  # type: ignore[import-not-found]
import os
import threading
from collections import UserList
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from signal import SIGINT
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from pyro.poutine import collapse_messenger, indep_messenger, messenger, runtime
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DimAllocator

if TYPE_CHECKING:
    from typing_extensions import Self


class _Stack(threading.local, UserList[Any]):
    """A list for each thread, whose parts are plain lists."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.data)


class _Dimensions(threading.local, _DimAllocator):
    """The dimensions of plates, of each thread."""


def _give_each_thread_its_own() -> None:
    stack, dimensions = _Stack(), _Dimensions()
    stack.data.extend(runtime._PYRO_STACK)
    for module in (runtime, messenger, collapse_messenger):
        module._PYRO_STACK = stack
    dimensions._stack.extend(runtime._DIM_ALLOCATOR._stack)
    for module in (runtime, indep_messenger):
        module._DIM_ALLOCATOR = dimensions


if not isinstance(runtime._PYRO_STACK, _Stack):
    _give_each_thread_its_own()


def handlers() -> list[Messenger]:
    """Return the handlers that are active in this thread, the outermost first."""
    return list(runtime._PYRO_STACK)


@contextmanager
def only_handlers(active: Sequence[Messenger]) -> Iterator[None]:
    """Let just these handlers be active in this thread."""
    stack: Any = runtime._PYRO_STACK
    before, stack.data = stack.data, list(active)
    try:
        yield
    finally:
        stack.data = before


def in_backward() -> bool:
    """Say whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_engine() -> bool:
    """Say whether this thread is one of autograd's engine, which runs a backward for another."""
    # Threads that Python has not started have a substitute object.
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


# --------------------------------------------------------------------------- one at a time


_SIGINT = int(SIGINT)


class _Interrupts:
    """Ctrl-C, held back while something is half done; a second one is not."""

    def __init__(self) -> None:
        # Whether each of the nested blocks holds them back.
        self._holding: list[bool] = []
        self._before: Any = None
        self._pending: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._holding:
            before = _signal.getsignal(_SIGINT)
            if callable(before):
                self._before, self._pending = before, None
                _signal.signal(_SIGINT, self._receive)
        self._holding.append(True)

    def __exit__(self, *error: object) -> None:
        # A forked process, which has forgotten the blocks, may leave them all the same.
        if threading.current_thread() is not threading.main_thread() or not self._holding:
            return
        self._holding.pop()
        before = self._before
        if not self._holding and before is not None:
            self._before = None
            if _signal.getsignal(_SIGINT) == self._receive:
                _signal.signal(_SIGINT, before)
        self._raise_pending(before)

    def let_in(self) -> _LetIn:
        """Let interrupts in for a while, such as that of a user's function, although they are held.

        One that was held back comes first. Where nothing holds them back, nothing changes.
        """
        return _LetIn()

    def let_in_between(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield items, and let interrupts in while each is made."""
        with self.let_in():
            iterator = iter(items)
        while True:
            with self.let_in():
                item = next(iterator, self)
            if item is self:
                return
            yield item

    def go_on(self) -> None:
        """Treat them in this block as the block around it does."""
        if threading.current_thread() is threading.main_thread():
            self._holding[-1] = len(self._holding) > 1 and self._holding[-2]
            self._raise_pending(self._before)

    def hold(self) -> None:
        """Hold them back for the rest of this block."""
        if threading.current_thread() is threading.main_thread() and self._holding:
            self._holding[-1] = True

    def renew(self) -> None:
        """Hold nothing back in a forked process: what is half done is its parent's."""
        if self._is_holding():
            if self._before is not None:
                _signal.signal(_SIGINT, self._before)
            self.__init__()  # type: ignore[misc]

    def _is_holding(self) -> bool:
        return bool(self._holding) and self._holding[-1]

    def _raise_pending(self, before: Any) -> None:
        if self._pending is not None and not self._is_holding():
            pending, self._pending = self._pending, None
            before(*pending)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if (self._pending is None and self._is_holding()) or _is_changing(frame):
            self._pending = number, frame
        else:
            self._pending = None
            self._before(number, frame)


class _LetIn:
    """What `let_in` returns."""

    def __enter__(self) -> None:
        INTERRUPTS.__enter__()
        try:
            if threading.current_thread() is threading.main_thread():
                INTERRUPTS._holding[-1] = False
                INTERRUPTS._raise_pending(INTERRUPTS._before)
        except BaseException:
            INTERRUPTS.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        INTERRUPTS.__exit__()


def _is_changing(frame: FrameType | None) -> bool:
    """Say whether a handler, or what is exclusive or held back, is being entered or left."""
    while frame is not None:
        in_method = frame.f_code.co_name in ("__enter__", "__exit__")
        own = frame.f_locals.get("self") if in_method else None
        if isinstance(own, Handler | _Exclusive | _Interrupts | _LetIn):
            return True
        frame = frame.f_back
    return False


# Seconds after which an interrupt ends a wait for another thread.
_WAIT = 0.1


class _Exclusive:
    """What `exclusive` returns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        INTERRUPTS.__enter__()
        # They are held back by then, as one that came after the lock would leave it behind.
        while not self._lock.acquire(timeout=_WAIT):
            INTERRUPTS.__exit__()
            INTERRUPTS.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        INTERRUPTS.__exit__()

    def renew(self) -> None:
        """Forget which thread holds the lock: in a forked process there is only one."""
        self._lock = threading.RLock()
        INTERRUPTS.renew()


INTERRUPTS = _Interrupts()
_EXCLUSIVE = _Exclusive()
_NOT_EXCLUSIVE = nullcontext()
if hasattr(os, "register_at_fork"):
    # A fork waits, because its process would find what another thread has half changed.
    os.register_at_fork(
        before=lambda: _EXCLUSIVE._lock.acquire(),
        after_in_parent=lambda: _EXCLUSIVE._lock.release(),
        after_in_child=_EXCLUSIVE.renew,
    )


class Handler(Messenger):
    """A handler that an interrupt from the keyboard leaves neither behind nor half entered."""

    def __enter__(self) -> Self:
        """Put the handler on the stack."""
        depth = len(runtime._PYRO_STACK)
        INTERRUPTS.__enter__()
        try:
            super().__enter__()
            INTERRUPTS.go_on()
        except BaseException:
            del runtime._PYRO_STACK[depth:]
            INTERRUPTS.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> Any:
        """Take the handler off the stack."""
        INTERRUPTS.hold()
        try:
            return super().__exit__(*error)
        finally:
            INTERRUPTS.__exit__()


def exclusive() -> AbstractContextManager[None]:
    """Let no other thread in while parameters, modes, generators or Pyro's settings are changed.

    These belong to the process. Threads can be nested in it as often as they like, and an interrupt
    from the keyboard waits for the end, or ends the wait for another thread. A thread of autograd's
    engine does not wait: it works for a thread that does, and that may be inside.
    """
    return _NOT_EXCLUSIVE if in_engine() else _EXCLUSIVE
