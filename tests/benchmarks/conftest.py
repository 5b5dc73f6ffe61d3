"""The benchmarks' modules, and their scripts run in this process with a command line of theirs."""

import gc
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks.helpers import BENCHMARKS, ROOT, Helper, RunScript

# The experiments' modules read data as the examples do.
FOLDERS = (BENCHMARKS, ROOT / "examples")


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    """Import a benchmark's module as its script does, from the directory of the benchmarks."""
    pytest.importorskip("torchvision", reason="the benchmarks' ResNet is torchvision's")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in FOLDERS:
            del sys.modules[name]


@pytest.fixture
def run_script(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunScript]:
    """Run a script in this process, and undo what a process of its own would take with it."""

    def run(name: str, *arguments: str) -> None:
        path = str(BENCHMARKS / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")

    yield run
    torch.set_num_threads(1)
    gc.unfreeze()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
