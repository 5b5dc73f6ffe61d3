"""How far inputs are from mean 0 and standard deviation 1."""

import warnings

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.nets import NetOf
from tyxe.bnn.checks import (
    OFF_CENTRE,
    UNLIKE,
    columns_of,
    distance_from_standard,
    distance_from_zero,
)

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
        nn.functional.one_hot(torch.arange(40) % 4).float(),
        table().repeat(1, 256) * torch.linspace(0.2, 1.2, 768),  # such as embeddings
        "no tensor",
    ],
)
def test_inputs_that_are_well(inputs):
    assert distance_from_standard(columns_of(NET, inputs)) < UNLIKE / 2
    assert distance_from_zero(columns_of(NET, inputs)) < OFF_CENTRE / 2


@pytest.mark.parametrize(
    ("inputs", "distance"),
    [
        (table() * torch.tensor([1.0, 1.0, 700.0]), 700),
        (table() + torch.tensor([0.0, 2000.0, 0.0]), 2000),
        (table() * torch.tensor([1.0, 1.0, 1e-3]), 1000),
        ({"table": (table(), 255 * torch.rand(40, 3, 8, 8))}, 150),
        (255 * torch.rand(64, 3, 100, 100), 150),  # of which a part is looked at
    ],
)
def test_inputs_that_are_not(inputs, distance):
    assert distance_from_standard(columns_of(NET, inputs)) == pytest.approx(distance, rel=0.3)
    first = nn.Sequential(nn.BatchNorm1d(3), NET)
    assert distance_from_standard(columns_of(first, inputs)) == 1.0


@pytest.mark.parametrize("std", [1e-3, 1.0, 5.0])
def test_a_mean_is_far_from_zero_in_standard_deviations_that_are_not_small(std):
    inputs = std * table(4_000) + torch.tensor([0.0, 0.0, 20.0])
    expected = 20 / max(std, 1.0)
    found = distance_from_zero(columns_of(NET, (table(), inputs)))
    assert found == pytest.approx(expected, rel=0.1)
    assert distance_from_zero(columns_of(nn.Sequential(nn.BatchNorm1d(3), NET), inputs)) == 0.0


def test_a_net_that_standardises_by_its_buffers():
    net = NetOf(lambda net, x: net.layer(x - net.mean), layer=nn.Linear(3, 1))
    net.register_buffer("mean", torch.tensor(2000.0))
    assert distance_from_standard(columns_of(net, 2000 + table())) == 1.0


LIKELIHOOD = tyxe.likelihoods.HomoskedasticGaussian(120, scale=1.0)
SGD = torch.optim.SGD


def variational():
    return bnns.mean_field(nn.Linear(3, 1), LIKELIHOOD)


def laplace(*data):
    return bnns.laplace(nn.Linear(3, 1), LIKELIHOOD, *data)


def chain():
    kernel = tyxe.samplers.HMC(step_size=1e-9, num_steps=1)
    return bnns.chains(nn.Linear(3, 1), LIKELIHOOD, kernel)


def still(weights):
    return SGD(weights, lr=1e-12)


FITS = {
    "variational": lambda data: variational().fit(data, still, 2),
    "Laplace": lambda data: laplace().fit(data, still, 2),
    "chain": lambda data: chain().fit(data, 2, warmup_steps=0),
    "loop of one's own": lambda data: tyxe.Trainable(variational())(data[0]),
    "ensemble in one tensor": lambda data: tyxe.EnsembleBNN(lambda _: variational(), 1).fit(
        data, SGD, 1, vectorize=True
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_fits_warn_once_and_name_the_cure(name):
    scales, y = torch.tensor([1.0, 1.0, 700.0]), torch.randn(40, 1)
    for x, count in ((table() * scales, 1), (table() + 20, 1), (table(), 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", tyxe.TyxeWarning)
            FITS[name]([(x, y)] * 3)
        told = [str(one.message) for one in caught if "not standardised" in str(one.message)]
        assert len(told) == count
        assert all("(x - mean) / std" in one for one in told)


def test_a_second_fit_does_not_warn_again():
    bnn, data = variational(), [(1000 + table(), torch.randn(40, 1))] * 3
    with pytest.warns(tyxe.TyxeWarning, match="not standardised"):
        bnn.fit(data, still, 1)
    bnn.fit(data, still, 1)


def test_a_trained_net_is_not_asked_how_it_was_trained():
    laplace([(1000 + table(), torch.randn(40, 1))])
