"""The parameters of `q(U)` for all layers of a guide, with one class per family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.distributions.inducing_u import (
    DiagonalU,
    EnsembleU,
    FullU,
    InducingU,
    MatrixU,
    Turn,
)
from tyxe.files import packed, unpacked
from tyxe.guides.normal import capped_log, uncapped
from tyxe.util import SiteTensors


@dataclass(frozen=True)
class FamilyOptions:
    """The start of `q(U)`, by the fields of `InducingOptions`."""

    init_scale_u: float
    max_scale_u: float | None
    ensemble_size: int
    ensemble_spread: float

    def unconstrained(self, like: Tensor, power: float = 1.0) -> Tensor:
        """Return start values of `like`'s shape for scales to a power."""
        start, cap = torch.tensor(self.init_scale_u), self.cap(power)
        names = ("init_scale_u", "max_scale_u")
        return uncapped(start.double() ** power, cap, names).to(like).expand_as(like)

    def cap(self, power: float = 1.0) -> float | None:
        """Return the cap of scales to a power."""
        return None if self.max_scale_u is None else self.max_scale_u**power


class InducingFamily(nn.Module, ABC):
    """Base of the families of `q(U)`; the means start at `starts`, `(M_r, M_c)` by layer."""

    def __init__(self, starts: Mapping[str, Tensor], options: FamilyOptions) -> None:
        super().__init__()
        self.options = options

    @abstractmethod
    def distributions(self) -> dict[str, InducingU]:
        """Return `q(U)` of every layer."""

    @staticmethod
    @abstractmethod
    def count(rows: int, columns: int, ensemble_size: int) -> int:
        """Return the number of parameters of one layer's `q(U)`."""


class DiagonalFamily(InducingFamily):
    """A mean and a standard deviation per inducing weight."""

    def __init__(self, starts: Mapping[str, Tensor], options: FamilyOptions) -> None:
        super().__init__(starts, options)
        self.locs = SiteTensors(starts)
        self.scales = SiteTensors({n: options.unconstrained(s) for n, s in starts.items()})

    def distributions(self) -> dict[str, InducingU]:
        cap = self.options.max_scale_u
        return {n: DiagonalU(loc, capped_log(self.scales[n], cap)) for n, loc in self.locs.items()}

    @staticmethod
    def count(rows: int, columns: int, ensemble_size: int) -> int:
        return 2 * rows * columns


def _unit_rows(packed: Tensor, size: int) -> Tensor:
    """Return the Cholesky factor of a correlation matrix from the entries below its diagonal."""
    rows, columns = torch.tril_indices(size, size, -1, device=packed.device)
    identity = torch.eye(size, dtype=packed.dtype, device=packed.device)
    factor = identity.index_put((rows, columns), packed)
    return factor / factor.norm(dim=1, keepdim=True)


def _packed_zeros(size: int, like: Tensor) -> Tensor:
    return like.new_zeros(size * (size - 1) // 2)


class FullFamily(InducingFamily):
    """A full covariance: standard deviations, and the Cholesky factor of correlations."""

    def __init__(self, starts: Mapping[str, Tensor], options: FamilyOptions) -> None:
        super().__init__(starts, options)
        self.locs = SiteTensors(starts)
        self.scales = SiteTensors({n: options.unconstrained(s) for n, s in starts.items()})
        self.scale_factors = SiteTensors(
            {n: _packed_zeros(s.numel(), s) for n, s in starts.items()}
        )

    def distributions(self) -> dict[str, InducingU]:
        found: dict[str, InducingU] = {}
        for name, loc in self.locs.items():
            scale = capped_log(self.scales[name], self.options.max_scale_u).exp().reshape(-1, 1)
            found[name] = FullU(loc, scale * _unit_rows(self.scale_factors[name], loc.numel()))
        return found

    @staticmethod
    def count(rows: int, columns: int, ensemble_size: int) -> int:
        size = rows * columns
        return size + size * (size + 1) // 2


class MatrixFamily(InducingFamily):
    """A matrix normal with a covariance of rows and one of columns; the cap is on their product."""

    def __init__(self, starts: Mapping[str, Tensor], options: FamilyOptions) -> None:
        super().__init__(starts, options)
        self.locs = SiteTensors(starts)
        scales, factors = {}, {}
        for name, start in starts.items():
            for side, like in (("rows", start[:, 0]), ("columns", start[0])):
                scales[f"{name}.{side}"] = options.unconstrained(like, 0.5)
                factors[f"{name}.{side}"] = _packed_zeros(len(like), like)
        self.scales, self.scale_factors = SiteTensors(scales), SiteTensors(factors)

    def _tril(self, name: str) -> Tensor:
        scale = capped_log(self.scales[name], self.options.cap(0.5)).exp()
        return scale[:, None] * _unit_rows(self.scale_factors[name], len(scale))

    def distributions(self) -> dict[str, InducingU]:
        return {
            name: MatrixU(loc, self._tril(f"{name}.rows"), self._tril(f"{name}.columns"))
            for name, loc in self.locs.items()
        }

    @staticmethod
    def count(rows: int, columns: int, ensemble_size: int) -> int:
        return rows * columns + rows * (rows + 1) // 2 + columns * (columns + 1) // 2


class EnsembleFamily(InducingFamily):
    """Points; a training step uses one, and the next one has its turn after a backward pass."""

    def __init__(self, starts: Mapping[str, Tensor], options: FamilyOptions) -> None:
        super().__init__(starts, options)
        members = {}
        for name, start in starts.items():
            noise = torch.randn(options.ensemble_size, *start.shape).to(start)
            members[name] = start + options.ensemble_spread * noise
        self.locs = SiteTensors(members)
        self._next = self._taken = 0
        self._watched: tuple[Tensor, ...] = ()  # in a tuple, so as not to be registered again

    def distributions(self) -> dict[str, InducingU]:
        turn = self._turn()
        return {name: EnsembleU(members, turn) for name, members in self.locs.items()}

    @staticmethod
    def count(rows: int, columns: int, ensemble_size: int) -> int:
        return ensemble_size * rows * columns

    def _turn(self) -> Turn:
        first = next(iter(self.locs.items()))[1]
        if not (torch.is_grad_enabled() and first.requires_grad):
            return Turn(None, self.options.ensemble_size)
        self._watch(first)
        self._taken = self._next
        return Turn(self._next, self.options.ensemble_size)

    def _watch(self, parameter: Tensor) -> None:
        # Not in the constructor, because copies and assigned state dicts bring other parameters.
        if not (self._watched and self._watched[0] is parameter):
            parameter.register_post_accumulate_grad_hook(self._go_on)
            self._watched = (parameter,)

    def _go_on(self, parameter: Tensor) -> None:
        self._next = (self._taken + 1) % self.options.ensemble_size

    def get_extra_state(self) -> Tensor:
        """Return the next member, so that a resumed fit continues with it."""
        return packed(self._next)

    def set_extra_state(self, state: Tensor) -> None:
        self._next = unpacked(state) % self.options.ensemble_size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": ()}


# By the names that `q_inducing` takes.
Q_INDUCING: dict[str, type[InducingFamily]] = {
    "diagonal": DiagonalFamily,
    "full": FullFamily,
    "matrix": MatrixFamily,
    "ensemble": EnsembleFamily,
}
