"""Running statistics of normalising layers, as averages over given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_INSTANCE

# The buffers of some layers.
Statistics = Mapping[Any, Mapping[str, Tensor]]


def norms_of(net: nn.Module) -> list[Any]:
    """Return the layers of a net that keep running statistics."""
    norms = (module for module in net.modules() if isinstance(module, _NORMS))
    return [norm for norm in norms if norm.track_running_stats]


@contextmanager
def statistics_in(statistics: Statistics) -> Iterator[None]:
    """Let layers have these statistics until the end."""
    before = {norm: dict(norm._buffers) for norm in statistics}
    try:
        for norm, buffers in statistics.items():
            norm._buffers.update(buffers)
        yield
    finally:
        for norm, buffers in before.items():
            norm._buffers.update(buffers)


def averaged_statistics(
    norms: Sequence[Any], run: Callable[[Any], Any], batches: Iterable[Any]
) -> Statistics:
    """Return averages over batches of the statistics of layers, which stay in train mode."""
    found = {norm: {name: b.clone() for name, b in norm.named_buffers()} for norm in norms}
    momenta = [norm.momentum for norm in norms]
    try:
        with statistics_in(found):
            for norm in norms:
                norm.train().reset_running_stats()
            for count, batch in enumerate(batches, 1):
                for norm in norms:  # None is the average of all calls, if not in an InstanceNorm
                    norm.momentum = 1 / count if isinstance(norm, _INSTANCE) else None
                run(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return found
