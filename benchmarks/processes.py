"""Training steps and curvature in two processes beside one: strong and weak scaling."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing as mp
from _harness import Case, Contestant, run
from _nets import images
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_step import SCALE

import tyxe
from tyxe.bnn.training import FitOptions, Trainer

POINTS = 50_000
PRIOR = tyxe.priors.IIDPrior(torch.distributions.Normal(0.0, 1.0))


def cnn(width: int) -> nn.Sequential:
    """Return four convolutions and a linear head: much arithmetic, few parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
    )


def step_of(rows: int, width: int) -> Callable[[], Any]:
    """Return the step of a mean field on some rows of a batch, averaged over the processes."""
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=SCALE)
    bnn = tyxe.VariationalBNN(cnn(width), PRIOR, tyxe.likelihoods.Categorical(POINTS), guide)
    x, y = images(rows)
    alone = torch.distributed.get_world_size() == 1
    parallel = None if alone else DistributedDataParallel
    trainer = Trainer(bnn.train(), torch.optim.Adam, FitOptions(parallel=parallel))
    return lambda: trainer.step([(x, y)], 1.0)


def wide_step_of(how: str, rows: int, width: int) -> Callable[[], Any]:
    """Return the step of a mean field on a net of many parameters, whole or in parts."""
    net = nn.Sequential(
        *(nn.Flatten(), nn.Linear(3072, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
    )
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=SCALE)
    bnn = tyxe.VariationalBNN(net, PRIOR, tyxe.likelihoods.Categorical(POINTS), guide)
    parallel = fully_shard if how == "fully_shard" else DistributedDataParallel
    trainer = Trainer(bnn.train(), torch.optim.Adam, FitOptions(parallel=parallel))
    epochs = trainer.epochs(0, 1, False)
    next(epochs)  # from when on parameters are divided
    batch = [images(rows)]
    return lambda: (epochs, trainer.step(batch, 1.0))


def curvature_of(rows: int, width: int) -> Callable[[], Any]:
    """Return the Kronecker factors of all layers over some rows, summed over the processes."""
    bnn = tyxe.LaplaceBNN(cnn(width), PRIOR, tyxe.likelihoods.Categorical(POINTS), structure="kron")
    x, y = images(rows)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    group = torch.distributed.group.WORLD
    return lambda: bnn.fit_curvature(batches, progress=False, process_group=group)


WORKS = {"step": step_of, "sharded": wide_step_of, "curvature": curvature_of}


def worker(rank: int, size: int, port: int, work: str, given: Any, pipe: Any) -> None:
    """Work whenever the parent says so, and tell it."""
    torch.set_num_threads(1)
    place = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    torch.manual_seed(0)
    run_once = WORKS[work](*given)
    run_once()
    pipe.send(None)
    with contextlib.suppress(EOFError):  # the parent has gone on
        while count := pipe.recv():
            for _ in range(count):
                run_once()
            torch.distributed.barrier()
            pipe.send(None)
    torch.distributed.destroy_process_group()


class Group:
    """Processes that do the same work at the same time."""

    def __init__(self, size: int, work: str, given: Sequence[Any], count: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        pairs = [context.Pipe() for _ in range(size)]
        self.count, self.pipes = count, [own for own, _ in pairs]
        for rank, (_, other) in enumerate(pairs):
            arguments = (rank, size, port, work, tuple(given), other)
            context.Process(target=worker, args=arguments, daemon=True).start()
        self._wait()

    def _wait(self) -> None:
        for pipe in self.pipes:
            pipe.recv()

    def run(self) -> int:
        """Do the work some times, and return how often."""
        for pipe in self.pipes:
            pipe.send(self.count)
        self._wait()
        return self.count


def who(size: int) -> str:
    """Return who runs in so many processes: one is the yardstick."""
    return "ours" if size > 1 else "plain"


def case(work: str, rows: int, smoke_test: bool) -> Case:
    """Return one process, two that share out its points, and two of as many points each."""
    count = 1 if smoke_test else 3
    rows, width = (8, 2) if smoke_test else (rows, 32)
    sizes = {
        "one process": (1, rows),
        "two processes, half of the points each": (2, rows // 2),
        "two processes, as many points each": (2, rows),
    }
    found = [
        Contestant(name, Group(size, work, (own, width), count).run, who(size))
        for name, (size, own) in sizes.items()
    ]
    what = "training step of a mean field" if work == "step" else "curvature, Kronecker factors"
    return Case(work, f"{what}, CNN of 32 to 64 channels, {rows} points", "call", 9, found)


def sharded(smoke_test: bool) -> Case:
    """Return two processes that average gradients of whole parameters, and two of parts."""
    count = 1 if smoke_test else 3
    rows, width = (4, 8) if smoke_test else (32, 512)
    found = [
        Contestant(how, Group(2, "sharded", (how, rows, width), count).run, whose)
        for how, whose in {"DistributedDataParallel": "plain", "fully_shard": "ours"}.items()
    ]
    title = "training step of a mean field, MLP of 1.8 million weights, 32 points in each of two"
    return Case("sharded", f"{title} processes", "call", 9, found)


if __name__ == "__main__":
    run(
        "Wall seconds of one process and of two, each of one thread: by halves of its points "
        "(strong scaling, ideally .5) and by as many points each (weak scaling, ideally 1).",
        {
            "step": functools.partial(case, "step", 128),
            "sharded": sharded,
            "curvature": functools.partial(case, "curvature", 128),
        },
    )
