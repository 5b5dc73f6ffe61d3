"""The guide of stochastic weight averaging: a Gaussian about the path of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.guides.base import Guide, Site, check_real
from tyxe.guides.init import init_to_net
from tyxe.linalg import Inverse, LowRank
from tyxe.util import SiteTensors, at_least_float32, with_float32

# Of a weight that has not moved.
LEAST_VARIANCE = 1e-30


class SWAGGuide(Guide):
    r"""`N(m, 1/2 (diag s^2 + D D^T / (K - 1)))` over all sites, or a delta while it `moves`.

    `m` and `s^2` are mean and variance of all snapshots; `D` has the deviations of the last `K`
    from the mean at that time. A step of training moves `locs`; `collect` takes a snapshot.

    Args:
        module: the program that samples the sites from their prior.
        rank: `K`, at least 2.

    Raises:
        ValueError: a rank below 2; a site with a constrained support.

    Reference:
        Maddox et al. 2019, algorithm 1.
    """

    def __init__(self, module: Callable[..., Any], rank: int = 20) -> None:
        super().__init__(module)
        check_real(self.sites, "SWAG's posterior")
        self.rank, self.moves = check.count("rank", rank, 2), False
        starts = {site.own_name: init_to_net(self.messages[site.name]) for site in self.sites}
        self.locs = SiteTensors(starts)
        self.blocks = ParamBlocks.of_sites({site.name: site.shape for site in self.sites})
        start = at_least_float32(torch.cat([loc.flatten() for loc in starts.values()]))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long, device=start.device))
        self.mean, self.squares = (nn.Buffer(torch.zeros_like(start)) for _ in range(2))
        self.deviations = nn.Buffer(start.new_zeros(self.rank, len(start)))
        # Whether the next snapshot is the first of others, as after an update of the prior.
        self.ended = nn.Buffer(torch.zeros((), dtype=torch.bool, device=start.device))

    @property
    def kind(self) -> str:
        return f"{type(self).__name__}(rank={self.rank})"

    @property
    def has_spread(self) -> bool:
        return not self.moves

    @torch.no_grad()
    def collect(self, values: Mapping[str, Tensor]) -> None:
        """Take a snapshot of values by joint name; one that is not finite is a ValueError."""
        for name, value in values.items():
            check.numbers(name, value, "finite numbers")
        if self.ended:
            self.reset()
        before = self.blocks.flatten(values).to(self.mean) - self.mean
        self.mean.add_(before / self.count.add_(1))
        after = before - before / self.count
        self.squares.add_(before * after)
        self.deviations[(int(self.count) - 1) % self.rank] = after

    def reset(self) -> None:
        """Remove all snapshots."""
        for buffer in (self.count, self.mean, self.squares, self.deviations, self.ended):
            buffer.zero_()

    def joints(self) -> Iterable[Gaussian]:
        if self.moves:
            return ()
        if self.count < self.rank:
            raise RuntimeError(
                f"there are {int(self.count)} snapshots for rank={self.rank}, no posterior yet: "
                "call fit or collect(net), or build the BNN with a lower rank"
            )
        variance = (self.squares / self.count).clamp_min(LEAST_VARIANCE)
        factor = self.deviations.mT / (2 * (self.rank - 1)) ** 0.5
        return (Gaussian(self.blocks, self.mean, Inverse(LowRank(variance / 2, factor))),)

    def site_distribution(self, site: Site) -> td.Distribution:
        return dist.Delta(self.locs[site.own_name], event_dim=len(site.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SWAGGuide:
        own = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update({n: with_float32(fn)(b) for n, b in own.items() if b is not None})
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moves": False}
