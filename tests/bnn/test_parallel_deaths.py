"""A process that dies is an error of the others, and all go on from their files."""

import functools
import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.bnn.test_parallel import CLASSES, WORLD, batches, make
from tests.oracles import processes

EPOCHS, DIES_AFTER, SECONDS = 5, 2, 20
ADAM = functools.partial(torch.optim.Adam, lr=0.1)


def fit(bnn, rank, epochs, callback=None):
    data = batches(CLASSES, rank)
    bnn.fit(data, ADAM, epochs, callback, parallel=DistributedDataParallel)
    return bnn.state_dict()


def whole(rank):
    bnn = make()
    torch.manual_seed(rank)
    return fit(bnn, rank, EPOCHS)


def dying(rank, folder):
    """Return after how many seconds the death of another process was an error."""

    def save(bnn, epoch, loss):
        if epoch < DIES_AFTER:
            bnn.save(f"{folder}/{rank}.fit", training=True)
        elif rank == 1:
            os._exit(0)

    bnn = make()
    torch.manual_seed(rank)
    start = time.monotonic()
    try:
        fit(bnn, rank, EPOCHS, save)
    except RuntimeError:
        return time.monotonic() - start


def resumed(rank, folder):
    """Return the state of a fit that nothing ended, and of one that goes on from a file."""
    expected, bnn = whole(rank), make()
    bnn.load(f"{folder}/{rank}.fit")
    return expected, fit(bnn, rank, EPOCHS - DIES_AFTER)


def test_the_others_raise_within_the_timeout_and_all_go_on_from_their_files(tmp_path):
    seconds, died = processes.run(dying, WORLD, tmp_path, tmp_path, seconds=SECONDS)
    assert died is None
    assert seconds < SECONDS + 10
    for expected, found in processes.run(resumed, WORLD, tmp_path, tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
