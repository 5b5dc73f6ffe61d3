"""Families of posteriors `q(U)` of inducing weights, and their parameters."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from tyxe import check
from tyxe.distributions.inducing import InducingU, SampleShape
from tyxe.distributions.inducing_formulas import identity
from tyxe.files import as_bytes, of_bytes
from tyxe.guides.normal import AutoNormal, capped_log, uncapped
from tyxe.util import SiteTensors


@dataclass(frozen=True)
class InducingOptions:
    """Options of `AutoInducing`, which also takes each of them as a keyword.

    Attributes:
        ensemble_size: members of `q_inducing="ensemble"`; with 1, a point estimate of `U`.
        whitened: `q` is over `U_w = C_r^-1 U C_c^-T`, whose prior is `N(0, 1)`.
        init_lambda: start of the scale of the conditional posterior.
        max_lambda: its cap; 0 makes weights a function of `U`, and leaves `R(lambda)` out.
        init_scale_u: start of the standard deviations of `U`.
        max_scale_u: their cap.
        init_residual: start of `D`, in the prior covariance `Z Z^T + D^2` of `U`.
        ensemble_spread: standard deviation of the noise between members at the start.
        everywhere: give inducing weights of exactly these sizes to every layer.
        hierarchical: `(rows, columns)` of one global matrix above the stacked `U` of all layers.
        dataset_size: weigh `R(lambda)` by `min(1, N / columns)`, the function-space form.
        mean_field: builds the guide of the sites without inducing weights.

    Raises:
        TypeError: a count or a scale that is not a number.
        ValueError: a number out of range, or `hierarchical` inducing weights that are not whitened.
    """

    ensemble_size: int = check.field(5, check.count)
    whitened: bool = True
    init_lambda: float = 1e-3
    max_lambda: float | None = check.field(None, check.number, least=0)
    init_scale_u: float = math.sqrt(1e-3)
    max_scale_u: float | None = check.field(None, check.number, above=0)
    init_residual: float = check.field(1e-3, check.number, above=0)
    ensemble_spread: float = 0.1
    everywhere: bool = False
    hierarchical: tuple[int, int] | None = None
    dataset_size: int | None = check.field(None, check.count)
    mean_field: Callable[[Callable[..., Any]], Any] = AutoNormal

    def __post_init__(self) -> None:
        check.fields(self)
        if self.hierarchical is not None and not self.whitened:
            raise ValueError("hierarchical inducing weights stack whitened ones: whitened=True")

    def start_of_scale(self, like: Tensor, power: float = 1.0) -> Tensor:
        """Return unconstrained starts, of `like`'s shape, of scales of `U` to a power."""
        start = torch.tensor(self.init_scale_u, device="cpu").double() ** power
        unconstrained = uncapped(start, self._cap(power), ("init_scale_u", "max_scale_u"))
        return unconstrained.to(like).expand_as(like)

    def log_scale(self, unconstrained: Tensor, power: float = 1.0) -> Tensor:
        """Return the logarithm of scales of `U` to a power."""
        return capped_log(unconstrained, self._cap(power))

    def _cap(self, power: float) -> float | None:
        return None if self.max_scale_u is None else self.max_scale_u**power


# Columns of a covariance's root that are mapped at a time, to limit memory.
_CHUNK = 256


# Starts of one layer's parameters, by names with `{}` for the layer's; and what looks them up.
Starts = dict[str, Tensor]
Found = Callable[[str], Tensor]


def _start_of_tril(part: str, like: Tensor, options: InducingOptions, power: float) -> Starts:
    """Return the parameters of a Cholesky factor, from a tensor of its scales' shape."""
    size = like.numel()
    below = like.new_zeros(size * (size - 1) // 2)
    scales = options.start_of_scale(like, power)
    return {"scales.{}" + part: scales, "scale_factors.{}" + part: below}


def _tril(part: str, found: Found, options: InducingOptions, power: float) -> Tensor:
    """Return scales to a power, times the factor of correlations with given entries below 1."""
    scale = options.log_scale(found("scales.{}" + part), power).exp().reshape(-1, 1)
    below, size = found("scale_factors.{}" + part), len(scale)
    rows, columns = torch.tril_indices(size, size, -1, device=below.device)
    factor = identity(size, below).index_put((rows, columns), below)
    return scale * (factor / factor.norm(dim=1, keepdim=True))


def _sandwich(rows: Tensor | None, matrix: Tensor, columns: Tensor | None) -> Tensor:
    """Return `rows X columns^T`."""
    left = matrix if rows is None else rows @ matrix
    return left if columns is None else left @ columns.mT


class FamilyU(InducingU):
    """Base of the families of `q(U)`, which say what their parameters are."""

    @staticmethod
    @abstractmethod
    def start(loc: Tensor, options: InducingOptions) -> Starts:
        """Return the parameters of a layer whose mean starts at `loc`, `(M_r, M_c)`."""

    @classmethod
    @abstractmethod
    def of(cls, found: Found, options: InducingOptions) -> FamilyU:
        """Return the distribution with these parameters."""

    @classmethod
    def count(cls, rows: int, columns: int, options: InducingOptions) -> int:
        """Return the number of a layer's parameters."""
        like = torch.empty(rows, columns, device="meta")
        return sum(tensor.numel() for tensor in cls.start(like, options).values())


class GaussianU(FamilyU):
    """Base of Normal `q(U)`, with means `loc`, `(M_r, M_c)`."""

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Return standard normal noise, `(..., M_r, M_c)`, times a root of the covariance."""

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return self.loc + self.root(self.loc.new_empty((*sample_shape, *self.loc.shape)).normal_())

    def components(self) -> tuple[Tensor, Tensor]:
        noise = identity(self.loc.numel(), self.loc).unflatten(-1, self.loc.shape)
        root = self.root(noise).flatten(1)
        return self.loc.reshape(1, -1), root.mT @ root


class DiagonalU(GaussianU):
    """Independent Normals (FFG-U); means and log-scales are `(M_r, M_c)`."""

    def __init__(self, loc: Tensor, log_scale: Tensor) -> None:
        self.log_scale = log_scale
        super().__init__(loc)

    @staticmethod
    def start(loc: Tensor, options: InducingOptions) -> Starts:
        return {"locs.{}": loc, "scales.{}": options.start_of_scale(loc)}

    @classmethod
    def of(cls, found: Found, options: InducingOptions) -> DiagonalU:
        return cls(found("locs.{}"), options.log_scale(found("scales.{}")))

    def root(self, noise: Tensor) -> Tensor:
        return self.log_scale.exp() * noise

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        squared = [None if matrix is None else matrix.square() for matrix in (rows, columns)]
        return _sandwich(squared[0], (2 * self.log_scale).exp(), squared[1])

    def half_logdet(self) -> Tensor:
        return self.log_scale.sum()


class FullU(GaussianU):
    """A Normal with a full covariance (FCG-U), whose Cholesky factor is `(M_r M_c, M_r M_c)`."""

    def __init__(self, loc: Tensor, scale_tril: Tensor) -> None:
        self.scale_tril = scale_tril
        super().__init__(loc)

    @staticmethod
    def start(loc: Tensor, options: InducingOptions) -> Starts:
        return {"locs.{}": loc, **_start_of_tril("", loc, options, 1.0)}

    @classmethod
    def of(cls, found: Found, options: InducingOptions) -> FullU:
        return cls(found("locs.{}"), _tril("", found, options, 1.0))

    def root(self, noise: Tensor) -> Tensor:
        return (noise.flatten(-2) @ self.scale_tril.mT).unflatten(-1, self.loc.shape)

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        if rows is None and columns is None:
            return self.scale_tril.square().sum(-1).view(self.loc.shape)
        directions = self.scale_tril.mT.unflatten(-1, self.loc.shape)
        parts = [
            _sandwich(rows, chunk, columns).square().sum(0) for chunk in directions.split(_CHUNK)
        ]
        return torch.stack(parts).sum(0)

    def half_logdet(self) -> Tensor:
        return self.scale_tril.diagonal().log().sum()


class MatrixU(GaussianU):
    """A matrix normal, `MN(loc, T_r T_r^T, T_c T_c^T)`."""

    def __init__(self, loc: Tensor, row_scale_tril: Tensor, column_scale_tril: Tensor) -> None:
        self.row_scale_tril, self.column_scale_tril = row_scale_tril, column_scale_tril
        super().__init__(loc)

    @staticmethod
    def start(loc: Tensor, options: InducingOptions) -> Starts:
        rows = _start_of_tril(".rows", loc[:, 0], options, 0.5)
        columns = _start_of_tril(".columns", loc[0], options, 0.5)
        return {"locs.{}": loc, **rows, **columns}

    @classmethod
    def of(cls, found: Found, options: InducingOptions) -> MatrixU:
        rows, columns = (_tril(part, found, options, 0.5) for part in (".rows", ".columns"))
        return cls(found("locs.{}"), rows, columns)

    def root(self, noise: Tensor) -> Tensor:
        return self.row_scale_tril @ noise @ self.column_scale_tril.mT

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        left = self.row_scale_tril if rows is None else rows @ self.row_scale_tril
        right = self.column_scale_tril if columns is None else columns @ self.column_scale_tril
        return torch.outer(left.square().sum(-1), right.square().sum(-1))

    def half_logdet(self) -> Tensor:
        rows, columns = self.loc.shape
        left, right = (
            t.diagonal().log().sum() for t in (self.row_scale_tril, self.column_scale_tril)
        )
        return columns * left + rows * right


class Turn:
    """The member of an ensemble that comes first in all layers; drawn at the first use, if None."""

    def __init__(self, first: int | None, size: int) -> None:
        self._first, self.size = first, size

    @property
    def first(self) -> int:
        if self._first is None:
            self._first = int(torch.randint(self.size, (), device="cpu"))
        return self._first


class EnsembleU(FamilyU):
    """Equally likely points `(K, M_r, M_c)`; draws go through them, and the KL is left out."""

    def __init__(self, members: Tensor, turn: Turn | None = None) -> None:
        self.members = members
        self.turn = Turn(None, len(members)) if turn is None else turn
        self._drawn = 0
        super().__init__(members.shape[1:])

    @staticmethod
    def start(loc: Tensor, options: InducingOptions) -> Starts:
        # Numbers of the CPU's generator on all devices, and none where parameters are counted.
        device = "meta" if loc.is_meta else "cpu"
        noise = torch.randn(options.ensemble_size, *loc.shape, device=device).to(loc)
        return {"locs.{}": loc + options.ensemble_spread * noise}

    @classmethod
    def of(cls, found: Found, options: InducingOptions) -> EnsembleU:
        return cls(found("locs.{}"))

    @property
    def mean(self) -> Tensor:
        return self.members.mean(0)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        count, size = Size(sample_shape).numel(), len(self.members)
        start = self.turn.first + self._drawn
        self._drawn += count
        if not sample_shape:
            return self.members[start % size]
        indices = torch.arange(start, start + count, device=self.members.device) % size
        return self.members[indices].unflatten(0, tuple(sample_shape))

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        return _sandwich(rows, self.members - self.mean, columns).square().mean(0)

    def half_logdet(self) -> None:
        return None

    def components(self) -> tuple[Tensor, Tensor]:
        means = self.members.flatten(1)
        return means, means.new_zeros(means.shape[1], means.shape[1])


class WhitenedU(InducingU):
    """`C_r^-1 U C_c^-T` for a `U` with the prior `MN(0, C_r C_r^T, C_c C_c^T)`."""

    def __init__(self, base: InducingU, row_tril: Tensor, column_tril: Tensor) -> None:
        self.base, self.row_tril, self.column_tril = base, row_tril, column_tril
        super().__init__(base.event_shape)

    def _whiten(self, u: Tensor) -> Tensor:
        left = torch.linalg.solve_triangular(self.row_tril, u, upper=False)
        return torch.linalg.solve_triangular(self.column_tril.mT, left, upper=True, left=False)

    def _inverses(self) -> tuple[Tensor, Tensor]:
        row, column = (
            torch.linalg.solve_triangular(tril, identity(len(tril), tril), upper=False)
            for tril in (self.row_tril, self.column_tril)
        )
        return row, column

    @property
    def mean(self) -> Tensor:
        return self._whiten(self.base.mean)

    def rsample(self, sample_shape: SampleShape = ()) -> Tensor:
        return self._whiten(self.base.rsample(sample_shape))

    def variance_through(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        row, column = self._inverses()
        return self.base.variance_through(
            row if rows is None else rows @ row,
            column if columns is None else columns @ column,
        )

    def half_logdet(self) -> Tensor | None:
        found, (rows, columns) = self.base.half_logdet(), self.event_shape
        if found is None:
            return None
        row, column = (t.diagonal().log().sum() for t in (self.row_tril, self.column_tril))
        return found - columns * row - rows * column

    def components(self) -> tuple[Tensor, Tensor]:
        means, covariance = self.base.components()
        joint = torch.kron(*self._inverses())
        return means @ joint.mT, joint @ covariance @ joint.mT


# By the names that `q_inducing` takes.
Q_INDUCING: dict[str, type[FamilyU]] = {
    "diagonal": DiagonalU,
    "full": FullU,
    "matrix": MatrixU,
    "ensemble": EnsembleU,
}

# --------------------------------------------------------------------------- parameters


class InducingFamily(SiteTensors):
    """The parameters of `q(U)` of all layers, whose means start at `starts`."""

    def __init__(
        self, kind: type[FamilyU], starts: Mapping[str, Tensor], options: InducingOptions
    ) -> None:
        self.kind, self.options, self.layers = kind, options, list(starts)
        super().__init__(
            {
                key.format(layer): tensor
                for layer, start in starts.items()
                for key, tensor in kind.start(start, options).items()
            }
        )

    def distributions(self) -> dict[str, FamilyU]:
        """Return `q(U)` of every layer."""
        return {layer: self._of(layer) for layer in self.layers}

    def _of(self, layer: str) -> FamilyU:
        return self.kind.of(lambda key: self[key.format(layer)], self.options)


class EnsembleFamily(InducingFamily):
    """Points; a training step uses one, and the next one has its turn after a backward pass."""

    def __init__(
        self, kind: type[FamilyU], starts: Mapping[str, Tensor], options: InducingOptions
    ) -> None:
        super().__init__(kind, starts, options)
        self._next = self._taken = 0
        self._watched: tuple[Tensor, ...] = ()  # in a tuple, so as not to be registered again

    def distributions(self) -> dict[str, FamilyU]:
        first, size = self[f"locs.{self.layers[0]}"], self.options.ensemble_size
        turn = Turn(None, size)
        if torch.is_grad_enabled() and first.requires_grad:
            self._watch(first)
            self._taken = self._next
            turn = Turn(self._next, size)
        found = super().distributions()
        for u in found.values():
            assert isinstance(u, EnsembleU)
            u.turn = turn
        return found

    def _watch(self, parameter: Tensor) -> None:
        # Not in the constructor, because copies and assigned state dicts bring other parameters.
        if not (self._watched and self._watched[0] is parameter):
            parameter.register_post_accumulate_grad_hook(self._go_on)
            self._watched = (parameter,)

    def _go_on(self, parameter: Tensor) -> None:
        self._next = (self._taken + 1) % self.options.ensemble_size

    def get_extra_state(self) -> Tensor:
        """Return the next member, so that a resumed fit continues with it."""
        return as_bytes(self._next)

    def set_extra_state(self, state: Tensor) -> None:
        self._next = of_bytes(state) % self.options.ensemble_size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": ()}
