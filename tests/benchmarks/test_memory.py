"""Bytes are counted exactly, those within a step and those that live on."""

import gc
import time
from collections.abc import Iterator

import pytest
import torch

from tests.benchmarks.helpers import Helper


@pytest.fixture(autouse=True)
def heap_set_aside() -> Iterator[None]:
    """Every count begins with a collection, which need not look at what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_memory_is_counted_to_the_byte(helper: Helper) -> None:
    kept = []

    def work() -> None:
        first = torch.ones(1000)
        second = first + 1
        del first
        kept.append(second.double())

    assert helper("memory").recorded(work) == (4000 + 8000, 8000)


def test_a_step_that_leaves_memory_behind_is_no_step(helper: Helper) -> None:
    memory, harness = helper("memory"), helper("_harness")
    kept: list[torch.Tensor] = []
    leaking = harness.Contestant("leaking", lambda: kept.append(torch.ones(10)), "ours")
    with pytest.raises(RuntimeError, match="leaking left 40 bytes"):
        memory.transient(leaking, time.perf_counter)


def test_kept_between_steps(helper: Helper) -> None:
    """Plain: parameters and two moments. Ours: means and scales likewise, and the net's values."""
    script, vectors = helper("memory"), helper("_nets").vectors(8, True)
    rows = {c.name: c for c in script.contestants(lambda: helper("_nets").mlp(True), *vectors)}
    parameters = 16 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4
    plain, ours = rows["plain PyTorch"].facts, rows["plain sampling, ours"].facts
    assert plain[script.PARAMETERS] == pytest.approx(4e-6 * parameters)
    # Besides, Adam keeps one number for each of the tensors.
    assert plain[script.KEPT] == pytest.approx(4e-6 * (3 * parameters + 6))
    assert ours[script.KEPT] == pytest.approx(4e-6 * (7 * parameters + 12), abs=2e-4)
