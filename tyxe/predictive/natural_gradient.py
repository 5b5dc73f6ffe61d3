r"""Natural-gradient steps of a Gaussian in the linearised net, over weights or over outputs.

The Jacobian stays fixed and `P0` is diagonal, so every Gaussian that the steps reach from the
Laplace approximation about `w0` has

    `Lambda = P0 + J^T D J`,    `mu = m0 + c (w0 - m0) + P0^-1 J^T a`,

with `D` block-diagonal like the output Hessians, a number `c`, and `a` with an element for each
output of each point. With the kernel `K = J P0^-1 J^T` the only cost of a step that grows with `P`
is a product with `J` for the draws. This is cheaper where there are fewer outputs than weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tyxe.linalg import LowRank, Operator
from tyxe.linalg.checks import check_finite
from tyxe.predictive.features import Features, Part
from tyxe.predictive.linear_model import CHUNK, STRUCTURES, LinearModel
from tyxe.predictive.links import sample_outputs
from tyxe.predictive.matheron import ConditionedKernel

Posterior = tuple[Tensor, Operator]


class Iterate(ABC):
    """A Gaussian `N(mu, Lambda^-1)` over a linearised net's weights, and its next steps."""

    model: LinearModel

    @abstractmethod
    def posterior(self) -> Posterior:
        """Return `mu`, `(P,)`, and `Lambda`."""

    @abstractmethod
    def moved(self, residuals: Tensor, blocks: Tensor, rate: float) -> Iterate | None:
        """Return the Gaussian after a step of rate `rho`, or None if that is not finite.

        The step takes expectations of what `LinearModel.local` returns: `residuals` `E[r]`,
        `(N, K)`, and `blocks` `E[H]`, `(N, R, C, C)`.
        """

    def joint_draws(self, num: int) -> Iterator[Tensor]:
        """Yield outputs `(N, ...)` of draws of the weights, which are the same for all points.

        Every second draw is the mirror image of the one before.
        """
        return _mirrored(self._center(), self._joint_deviations, num)

    def pointwise_draws(self, num: int) -> Iterator[Tensor]:
        """Yield outputs `(N, ...)` drawn for each point separately, every second a mirror image."""
        covariance = self._output_covariance()
        zeros = covariance.new_zeros(covariance.shape[:-1])
        return _mirrored(self._center(), lambda half: sample_outputs(zeros, covariance, half), num)

    @abstractmethod
    def _center(self) -> Tensor:
        """Return the outputs at `mu`, `(N, ...)`."""

    @abstractmethod
    def _joint_deviations(self, num: int) -> Tensor:
        """Return draws of `J (w - mu)`, `num` times all outputs."""

    @abstractmethod
    def _output_covariance(self) -> Tensor:
        """Return `J_n Lambda^-1 J_n^T` of each point, `(N, K, K)`."""


def _mirrored(center: Tensor, draw: Callable[[int], Tensor], num: int) -> Iterator[Tensor]:
    deviations = draw((num + 1) // 2)
    for index in range(num):
        yield center + deviations[index // 2].view_as(center) * (1 - 2 * (index % 2))


def started(model: LinearModel, structure: str) -> Iterate:
    """Return the Laplace approximation about `w0`, over outputs if they are fewer than weights."""
    fewer = model.jacobian[..., 0].numel() < model.jacobian.shape[-1]
    # The kernel needs a prior on every weight.
    if structure == "full" and fewer and bool((model.prior_precision > 0).all()):
        return OutputIterate.start(model)
    blocks = model.local(model.outputs)[1]
    precision = STRUCTURES[structure](model.curvature(blocks, structure))
    return WeightIterate(model, structure, model.loc, precision)


@dataclass(frozen=True, eq=False)
class WeightIterate(Iterate):
    """A Gaussian given by `mu`, `(P,)`, and `Lambda`, of structure "full" or "diag"."""

    model: LinearModel
    structure: str
    mean: Tensor
    precision: Operator

    def posterior(self) -> Posterior:
        return self.mean, self.precision

    def moved(self, residuals: Tensor, blocks: Tensor, rate: float) -> WeightIterate | None:
        is_full = self.structure == "full"
        matrix = self.precision.to_dense() if is_full else self.precision.diagonal()
        matrix = (1 - rate) * matrix + rate * self.model.curvature(blocks, self.structure)
        gradient = self.model.gradient(self.mean, residuals)
        if not bool(matrix.isfinite().all() and gradient.isfinite().all()):
            return None
        precision = STRUCTURES[self.structure](matrix)
        mean = self.mean + rate * precision.solve(gradient)
        return replace(self, mean=mean, precision=precision)

    def _center(self) -> Tensor:
        return self.model.predict(self.mean)

    def _joint_deviations(self, num: int) -> Tensor:
        return self.precision.sample((num,)) @ self.model.jacobian.flatten(0, 1).mT

    def _output_covariance(self) -> Tensor:
        return self.model.output_covariance(self.precision)


@dataclass(frozen=True, eq=False)
class OutputIterate(Iterate):
    r"""A Gaussian given by `D`, `c` and `a` of the module's docstring.

    With the model's weight `l`, `u = l E[r] - a` and `b = J (w0 - m0)` a step is

        `D <- (1 - rho) D + rho l E[H]`,    `c <- (1 - rho) c`,
        `a <- a + rho (u - G (K u - c b))`,

    with the `G` of `ConditionedKernel` for the new `D`, and the old `c`. The outputs at the mean
    are `f + (c - 1) b + K a`. All is in float64, because covariances are small differences.

    Attributes:
        model: the linearised net.
        offset: `b`, `(N K,)`.
        given: `K` and `D`.
        dual: `a`, `(N K,)`.
        share: `c`.
    """

    model: LinearModel
    offset: Tensor
    given: ConditionedKernel
    dual: Tensor
    share: float = 1.0

    @classmethod
    def start(cls, model: LinearModel) -> OutputIterate:
        """Return the Laplace approximation about `w0`; `P0` has to be positive."""
        offset = model.jacobian.flatten(0, 1) @ (model.loc - model.prior_mean)
        kernel = check_finite(_kernel(model), "the kernel of the outputs")
        hessians = model.weight * model.local(model.outputs.double())[1]
        given = ConditionedKernel(kernel, check_finite(hessians, "the output Hessian"))
        return cls(model, offset.double(), given, torch.zeros_like(offset).double())

    def posterior(self) -> Posterior:
        model, root = self.model, self.given.root
        rows = model.jacobian
        shift = self.dual.to(rows) @ rows.flatten(0, 1) / model.prior_precision
        mean = model.prior_mean + self.share * (model.loc - model.prior_mean) + shift
        mixed = root.mT.to(rows) @ rows.reshape(*root.shape[:2], -1)
        return mean, LowRank(model.prior_precision, mixed.flatten(0, 1).mT)

    def moved(self, residuals: Tensor, blocks: Tensor, rate: float) -> OutputIterate | None:
        kernel, weight = self.given.kernel, self.model.weight
        hessians = (1 - rate) * self.given.hessians + rate * weight * blocks
        pull = weight * residuals.double().flatten() - self.dual
        if not bool(hessians.isfinite().all() and pull.isfinite().all()):
            return None
        given = ConditionedKernel(kernel, hessians)
        left = kernel @ pull - self.share * self.offset
        step = pull - given.explained(left[:, None])[:, 0]
        return replace(
            self, given=given, dual=self.dual + rate * step, share=(1 - rate) * self.share
        )

    def _center(self) -> Tensor:
        moved = (self.share - 1) * self.offset + self.given.kernel @ self.dual
        return self.model.outputs + moved.view_as(self.model.outputs)

    def _joint_deviations(self, num: int) -> Tensor:
        model = self.model
        sd = model.prior_precision.rsqrt()
        noise = torch.randn(num, len(sd), dtype=sd.dtype, device=sd.device)
        prior_draws = model.jacobian.flatten(0, 1) @ (noise * sd).mT
        return self.given.draws(prior_draws.double()).mT

    def _output_covariance(self) -> Tensor:
        return self.given.blocks(len(self.model.outputs))


def _kernel(model: LinearModel) -> Tensor:
    """Return `J P0^-1 J^T`, `(N K, N K)` in float64."""
    rows = model.jacobian * model.prior_precision.rsqrt()
    columns = max(1, CHUNK // rows[..., 0].numel())
    features = Features(tuple(map(Part, rows.split(columns, -1))))
    return features.kernel(features).flatten(2, 3).flatten(0, 1)
