"""Local processes side by side, which find something each."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing


def _worker(rank: int, work: Any, count: int, folder: str, seconds: int, given: Any) -> None:
    torch.set_num_threads(1)
    # Of trainers that make no processes themselves; on a machine with a GPU, a mesh would be of
    # that, and gloo has none.
    place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    store = torch.distributed.FileStore(f"{folder}/{work.__name__}.store", count)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=seconds)
    )
    torch.save(work(rank, *given), f"{folder}/{rank}.{work.__name__}")


def run(work: Any, count: int, folder: Path, *given: Any, seconds: int = 60) -> list[Any]:
    """Return what `work(rank, *given)` returns in each process; None where one has ended before."""
    arguments = work, count, str(folder), seconds, given
    torch.multiprocessing.spawn(_worker, arguments, nprocs=count)
    files = [folder / f"{rank}.{work.__name__}" for rank in range(count)]
    return [torch.load(file, weights_only=True) if file.exists() else None for file in files]
