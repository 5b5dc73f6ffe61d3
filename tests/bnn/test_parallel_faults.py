"""A process that dies in a fit is an error of the others, and all go on from their files."""

import functools
import os
import time
from datetime import timedelta
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tyxe

WORLD, EPOCHS, DIES_AFTER, SECONDS = 2, 5, 2, 20
X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(16) % 3
OPTIM = functools.partial(torch.optim.Adam, lr=0.1)


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(16), tyxe.guides.AutoNormal)


def part(rank):
    return [(X[rank::WORLD], Y[rank::WORLD])]


def joined(rank, folder, name):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/{name}", WORLD)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS)
    )


def whole(rank, folder):
    joined(rank, folder, "whole")
    bnn = make()
    torch.manual_seed(rank)
    bnn.fit(part(rank), OPTIM, EPOCHS, parallel=DistributedDataParallel)
    torch.save(bnn.state_dict(), f"{folder}/{rank}.whole")
    torch.distributed.destroy_process_group()


def dying(rank, folder):
    joined(rank, folder, "dying")
    bnn = make()

    def save(bnn, epoch, loss):
        if epoch < DIES_AFTER:
            bnn.save(f"{folder}/{rank}.fit", training=True)
        elif rank == 1:
            os._exit(0)

    torch.manual_seed(rank)
    start = time.monotonic()
    try:
        bnn.fit(part(rank), OPTIM, EPOCHS, save, parallel=DistributedDataParallel)
    except Exception as error:
        is_runtime_error, seconds = isinstance(error, RuntimeError), time.monotonic() - start
        Path(f"{folder}/said").write_text(f"{is_runtime_error} {seconds} {error}")


def resumed(rank, folder):
    joined(rank, folder, "resumed")
    bnn = make()
    bnn.load(f"{folder}/{rank}.fit")
    bnn.fit(part(rank), OPTIM, EPOCHS - DIES_AFTER, parallel=DistributedDataParallel)
    torch.save(bnn.state_dict(), f"{folder}/{rank}.resumed")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    found: Path = tmp_path_factory.mktemp("faults")
    for work in (whole, dying, resumed):
        torch.multiprocessing.spawn(work, (str(found),), nprocs=WORLD)
    return found


def test_the_others_raise_within_the_timeout(folder):
    is_runtime_error, seconds, _ = (folder / "said").read_text().split(" ", 2)
    assert is_runtime_error == "True"
    assert float(seconds) < SECONDS + 10


@pytest.mark.parametrize("rank", range(WORLD))
def test_all_go_on_from_their_files(folder, rank):
    expected = torch.load(folder / f"{rank}.whole", weights_only=True)
    found = torch.load(folder / f"{rank}.resumed", weights_only=True)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
