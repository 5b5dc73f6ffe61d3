"""How far inputs are from mean 0 and standard deviation 1."""

import pytest
import torch
from torch import nn

from tyxe.bnn.checks import UNLIKE, distance_from_standard

NET = nn.Linear(3, 1)


def table(rows=40, seed=0):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "inputs",
    [
        table(),
        (table(), {"other": table(seed=1)}),
        torch.rand(40, 3, 4, 4),  # images from 0 to 1
        torch.linspace(-2, 2, 300)[:, None],
        torch.cat([table(), torch.eye(40)], 1),  # a code of categories
        torch.cat([table(), torch.zeros(40, 2)], 1),
        (torch.randn(1000, 1).sort(0).values / 1.0)[:32],  # a batch of rows that are in order
        1000 * table()[:5],  # too few to say
        torch.randint(1000, (40, 3)),  # such as tokens
        "no tensor",
    ],
)
def test_inputs_that_are_well(inputs):
    assert distance_from_standard(NET, inputs) < UNLIKE / 2


@pytest.mark.parametrize(
    ("inputs", "distance"),
    [
        (table() * torch.tensor([1.0, 1.0, 700.0]), 700),
        (table() + torch.tensor([0.0, 2000.0, 0.0]), 2000),
        (table() * torch.tensor([1.0, 1.0, 1e-3]), 1000),
        ({"table": (table(), 255 * torch.rand(40, 3, 8, 8))}, 150),
    ],
)
def test_inputs_that_are_not(inputs, distance):
    assert distance_from_standard(NET, inputs) == pytest.approx(distance, rel=0.3)
    first = nn.Sequential(nn.BatchNorm1d(3), NET)
    assert distance_from_standard(first, inputs) == 1.0
