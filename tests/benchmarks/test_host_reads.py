"""Where the host reads numbers of tensors is found; how often is a matter of `tests/soak`."""

from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.benchmarks.helpers import Helper
from tyxe.bnn.training import FitOptions, Trainer


def test_reads_of_tensors_by_the_host_are_placed(helper: Helper) -> None:
    def step() -> None:
        flag = torch.ones(3).sum()
        for _ in range(2):
            bool(flag)
        torch.zeros(3).nonzero()

    found = helper("_gpu").host_reads(step, "cpu")
    here, line = Path(__file__).name, step.__code__.co_firstlineno
    assert found == {f"{here}:{line + 3}": 2, f"{here}:{line + 4}": 1}
    assert helper("_gpu").host_reads(step, "cuda") == {}


@pytest.mark.parametrize("name", ["Bernoulli", "Poisson"])
def test_targets_are_looked_at_without_another_read(name: str, helper: Helper) -> None:
    likelihood = getattr(tyxe.likelihoods, name)(10)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    bnn = tyxe.VariationalBNN(nn.Linear(2, 1), prior, likelihood, tyxe.guides.AutoNormal)
    trainer = Trainer(bnn, torch.optim.Adam, FitOptions())
    x, y = torch.randn(6, 2), torch.ones(6, 1)

    def step() -> None:
        with pyro.validation_enabled(False):
            trainer.step([(x, y)], 1.0)

    step()
    assert list(helper("_gpu").host_reads(step, "cpu").values()) == [1]
    with pytest.raises(ValueError, match=f"outside the support of {name}"):
        trainer.step([(x, -y)], 1.0)
