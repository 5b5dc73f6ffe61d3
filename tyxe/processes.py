"""What several processes do together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor


@contextmanager
def all_or_none(group: Any) -> Iterator[None]:
    """Let all processes of a group come out of a part of their work, or none.

    The error of one is a RuntimeError in all others, which would wait for it otherwise. Without a
    group, this is one process.
    """
    try:
        yield
    except BaseException:
        if group is not None:
            _failures(1, group)
        raise
    if group is not None and (count := _failures(0, group)):
        raise RuntimeError(
            f"{count} of {torch.distributed.get_world_size(group)} processes failed, and so do all:"
            " look at the error there"
        )


def _failures(own: int, group: Any) -> int:
    is_cuda = torch.distributed.get_backend(group) == "nccl"
    flag = torch.tensor([own], device="cuda" if is_cuda else "cpu")
    return int(total(flag, group)[0])


def shared(value: Any, owner: int, group: Any) -> Any:
    """Return the value that one of the processes has, of those in the group."""
    box = [value]
    source = torch.distributed.get_global_rank(group, owner)
    torch.distributed.broadcast_object_list(box, source, group)
    return box[0]


def total(values: Tensor, group: Any) -> Tensor:
    """Return the sum over processes, in place."""
    torch.distributed.all_reduce(values, group=group)
    return values
