"""Fixtures of the wrappers' tests."""

from typing import Any

import pytest
import torch

from tyxe import program as programs


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run programs as they were traced, since compiling each takes seconds."""
    made: list[Any] = []

    def keep(program: Any, *_: Any, **__: Any) -> Any:
        made.append(program)
        return program

    monkeypatch.setattr(torch._inductor, "compile", keep)
    monkeypatch.setattr(programs, "has_compiler", lambda device: True)
    return made
