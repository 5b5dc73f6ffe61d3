"""Handlers that Ctrl-C leaves neither on the stack nor half undone, wherever it comes."""

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from pyro.poutine import runtime

from tyxe.poutine import (
    flipout,
    local_reparameterization,
    report,
    selective_mask,
    selective_scale,
    variational_laplace,
)
from tyxe.threads import INTERRUPTS, exclusive, handlers

HANDLERS: dict[str, Callable[[], Any]] = {
    "local_reparameterization": local_reparameterization,
    "flipout": flipout,
    "report": report,
    "selective_mask": lambda: selective_mask(mask=torch.ones(2) > 0, expose=[]),
    "selective_scale": lambda: selective_scale(scale=0.5, expose=[]),
    "variational_laplace": variational_laplace,
}


class At:
    """Sends SIGINT at the start of a call or line of what `work` calls, counted from the first.

    Not in `work` itself, where Python takes no signal between the end of a block and `__exit__`.
    """

    times = 1

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a frame, and those that it calls."""
        if event in ("call", "line") and frame.f_code.co_name != "work":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                for _ in range(self.times):
                    signal.raise_signal(signal.SIGINT)
        return self


def interrupted(work: Callable[[], None], line: int) -> bool:
    """Run a function with an interrupt at a line; say whether it had that many."""
    sent = At(line)
    before = sys.gettrace()
    sys.settrace(sent)
    try:
        work()
    except KeyboardInterrupt:
        assert sent.left < 0
    finally:
        sys.settrace(before)
    return sent.left < 0


def lines_of(work: Callable[[], None]) -> int:
    """Interrupt each line of a function in turn, and return how many there are."""
    kernels = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    line, normal = 0, signal.getsignal(signal.SIGINT)
    try:
        while interrupted(work, line):
            assert not handlers(), f"left behind by an interrupt at line {line}"
            assert signal.getsignal(signal.SIGINT) is normal
            assert not INTERRUPTS._holding
            now = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
            assert now == kernels
            line += 1
    finally:
        del runtime._PYRO_STACK[:]
        signal.signal(signal.SIGINT, normal)
    return line


@pytest.mark.parametrize("make", HANDLERS.values(), ids=HANDLERS.keys())
def test_no_interrupt_leaves_a_handler_behind(make: Callable[[], Any]) -> None:
    def work() -> None:
        with make():
            pass

    assert lines_of(work) > 10


def test_no_interrupt_leaves_nested_handlers_behind() -> None:
    def work() -> None:
        with local_reparameterization(), exclusive(), report():
            pass

    assert lines_of(work) > 30


def test_an_interrupt_is_not_held_back_inside_of_a_handler() -> None:
    reached = []

    def inside() -> None:
        with local_reparameterization(), report():
            signal.raise_signal(signal.SIGINT)
            reached.append("later")

    def inside_of_both() -> None:
        with report():
            with exclusive():
                signal.raise_signal(signal.SIGINT)
                reached.append("exclusive")
            reached.append("later")

    for work in (inside, inside_of_both):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert not handlers()
    assert reached == ["exclusive"]


def test_a_handler_inside_of_what_is_exclusive_lets_no_interrupt_in() -> None:
    reached = []

    def work() -> None:
        with exclusive():
            with report(), report():
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["inner", "outer"]
    assert not INTERRUPTS._holding


def test_a_handler_that_is_entered_twice_stays_where_it_was() -> None:
    with report() as one:
        with pytest.raises(ValueError, match="twice"):
            one.__enter__()
        assert handlers() == [one]
    assert not handlers()
    assert not INTERRUPTS._holding


def test_a_second_interrupt_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(At, "times", 2)

    def work() -> None:
        with local_reparameterization(), exclusive(), exclusive():
            pass

    def enter() -> bool:
        with exclusive():
            return True

    assert lines_of(work) > 30
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result(60)
