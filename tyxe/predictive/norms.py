"""Running statistics of normalising layers, as averages over given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_INSTANCE

# The buffers of some layers.
Statistics = Mapping[Any, Mapping[str, Tensor]]


def norms_of(net: nn.Module) -> list[Any]:
    """Return the layers of a net that keep running statistics."""
    return [norm for norm in _norms_of(net) if norm.track_running_stats]


def fewest_rows(net: nn.Module, train: bool) -> int:
    """Return how many rows a batch of a net needs: norms take no statistics of one."""
    norms = [norm for norm in _norms_of(net) if train or not norm.track_running_stats]
    return 2 if any(train or not isinstance(norm, _INSTANCE) for norm in norms) else 1


def _norms_of(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, _NORMS)]


def put_statistics(statistics: Statistics) -> None:
    """Let layers have these statistics."""
    for norm, buffers in statistics.items():
        norm._buffers.update(buffers)


def averaged_statistics(
    norms: Mapping[Any, Any], run: Callable[[Any], Any], batches: Iterable[Any]
) -> Statistics:
    """Return averages over batches of the statistics of layers.

    `norms` has for each layer a copy with buffers of its own, and `run` runs the net of these
    copies on a batch.
    """
    for norm in norms.values():
        norm.train().reset_running_stats()
    for count, batch in enumerate(batches, 1):
        for norm in norms.values():  # None is the average of all calls, if not in an InstanceNorm
            norm.momentum = 1 / count if isinstance(norm, _INSTANCE) else None
        run(batch)
    return {norm: dict(copy.named_buffers()) for norm, copy in norms.items()}
