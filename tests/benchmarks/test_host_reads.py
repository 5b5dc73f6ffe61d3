"""Where the host reads numbers of tensors is found; how often is a matter of `tests/soak`."""

import warnings
from pathlib import Path

import torch

import tyxe
from tests.benchmarks.places import Helper


def test_reads_of_tensors_by_the_host_are_placed(helper: Helper) -> None:
    def step() -> None:
        flag = torch.ones(3).sum()
        for _ in range(2):
            bool(flag)
        torch.zeros(3).nonzero()

    found = helper("gpu").host_reads(step, "cpu")
    here, line = Path(__file__).name, step.__code__.co_firstlineno
    assert found == {f"{here}:{line + 3}": 2, f"{here}:{line + 4}": 1}
    assert helper("gpu").host_reads(step, "cuda") == {}


def test_reads_within_the_library_are_placed_there(helper: Helper) -> None:
    likelihood, logits = tyxe.likelihoods.Categorical(10), torch.tensor([[-2.0, 1.0]])
    found = helper("gpu").host_reads(lambda: likelihood.check_predictions(logits), "cpu")
    assert found
    assert all(name.startswith("tyxe/likelihoods/discrete.py:") for name in found)


def test_warnings_of_waits_are_counted(helper: Helper) -> None:
    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    assert list(helper("gpu").waits(step).values()) == [2]
