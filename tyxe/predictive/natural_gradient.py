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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tyxe import check
from tyxe.linalg import LowRank, Operator
from tyxe.linalg.checks import check_finite
from tyxe.predictive.linear_model import (
    CHUNK,
    STRUCTURES,
    Conditioned,
    Features,
    LinearModel,
    Part,
    Posterior,
)

# Class Hessians have an eigenvalue of zero, which rounding leaves far below this.
NEGLIGIBLE = 1e-8


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

    def draws(self, num: int) -> Iterator[Tensor]:
        """Yield outputs `(N, ...)` of draws of the weights, which are the same for all points.

        Every second draw is the mirror image of the one before.
        """
        center, deviations = self._center(), self._deviations((num + 1) // 2)
        for index in range(num):
            yield center + deviations[index // 2].view_as(center) * (1 - 2 * (index % 2))

    @abstractmethod
    def _center(self) -> Tensor:
        """Return the outputs at `mu`, `(N, ...)`."""

    @abstractmethod
    def _deviations(self, num: int) -> Tensor:
        """Return draws of `J (w - mu)`, `num` times all outputs."""


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

    def _deviations(self, num: int) -> Tensor:
        return self.precision.sample((num,)) @ self.model.jacobian.flatten(0, 1).mT


@dataclass(frozen=True, eq=False)
class OutputIterate(Iterate):
    r"""A Gaussian given by `D`, `c` and `a` of the module's docstring.

    With the model's weight `l`, `u = l E[r] - a` and `b = J (w0 - m0)` a step is

        `D <- (1 - rho) D + rho l E[H]`,    `c <- (1 - rho) c`,
        `a <- a + rho (u - G (K u - c b))`,

    with `G = R (I + R^T K R)^-1 R^T` of a root `R R^T` of the new `D`, and the old `c`. The
    outputs at the mean are `f + (c - 1) b + K a`, and their covariance is `K - K G K`, as in
    `gp.GPPredictive`. All is in float64, because covariances are small differences.
    """

    model: LinearModel
    offset: Tensor  # `b`, `(N K,)`
    kernel: Tensor  # `K`, `(N K, N K)`
    hessians: Tensor  # the blocks of `D`, `(N, R, C, C)`
    dual: Tensor  # `a`, `(N K,)`
    share: float = 1.0  # `c`

    @classmethod
    def start(cls, model: LinearModel) -> OutputIterate:
        """Return the Laplace approximation about `w0`; `P0` has to be positive."""
        offset = model.jacobian.flatten(0, 1) @ (model.loc - model.prior_mean)
        rows = model.jacobian * model.prior_precision.rsqrt()
        columns = max(1, CHUNK // rows[..., 0].numel())
        features = Features(tuple(map(Part, rows.split(columns, -1))))
        kernel = check_finite(features.kernel(features), "the kernel of the outputs")
        hessians = model.weight * model.local(model.outputs.double())[1]
        check_finite(hessians, "the output Hessian")
        return cls(model, offset.double(), kernel, hessians, torch.zeros_like(offset).double())

    @cached_property
    def root(self) -> Tensor:
        """`R`, `(N R, C, s)`, without the columns that are negligible next to the prior."""
        blocks = self.hessians.flatten(0, 1)
        if blocks.shape[-1] == 1:
            return blocks.sqrt()
        values, vectors = torch.linalg.eigh(blocks)
        # Without a column, Lambda changes by at most this share of itself.
        share = values.clamp_min(0).mT @ self.kernel.diagonal().view(blocks.shape[:2]).sum(1)
        found = share > NEGLIGIBLE
        return vectors[..., found] * values[:, None, found].clamp_min(0).sqrt()

    @cached_property
    def _given(self) -> Conditioned:
        return Conditioned(self._mixed(self._mixed(self.kernel).mT))

    def _mixed(self, x: Tensor) -> Tensor:
        """Return `R^T x` for columns `x`, `(N K, m)`."""
        return (self.root.mT @ x.reshape(*self.root.shape[:2], x.shape[1])).flatten(0, 1)

    def _pulled(self, mixed: Tensor) -> Tensor:
        """Return `R (I + R^T K R)^-1 x` for columns `x`."""
        solved = self._given.solve(mixed).unflatten(0, (len(self.root), -1))
        return (self.root @ solved).flatten(0, 1)

    def posterior(self) -> Posterior:
        model, rows = self.model, self.model.jacobian
        shift = self.dual.to(rows) @ rows.flatten(0, 1) / model.prior_precision
        mean = model.prior_mean + self.share * (model.loc - model.prior_mean) + shift
        mixed = self.root.mT.to(rows) @ rows.reshape(*self.root.shape[:2], -1)
        return mean, LowRank(model.prior_precision, mixed.flatten(0, 1).mT)

    def moved(self, residuals: Tensor, blocks: Tensor, rate: float) -> OutputIterate | None:
        weight = self.model.weight
        hessians = (1 - rate) * self.hessians + rate * weight * blocks
        pull = weight * residuals.double().flatten() - self.dual
        if not bool(hessians.isfinite().all() and pull.isfinite().all()):
            return None
        new = replace(self, hessians=hessians, share=(1 - rate) * self.share)
        left = self.kernel @ pull - self.share * self.offset
        step = pull - new._pulled(new._mixed(left[:, None]))[:, 0]
        return replace(new, dual=self.dual + rate * step)

    def _center(self) -> Tensor:
        moved = (self.share - 1) * self.offset + self.kernel @ self.dual
        return self.model.outputs + moved.view_as(self.model.outputs)

    def _deviations(self, num: int) -> Tensor:
        """By Matheron's rule, `e - K R (I + R^T K R)^-1 (R^T e + z)` for `e` of the prior."""
        sd = self.model.prior_precision.rsqrt()
        noise = torch.randn(num, len(sd), dtype=sd.dtype, device=sd.device)
        draws = (self.model.jacobian.flatten(0, 1) @ (noise * sd).mT).double()
        mixed = self._mixed(draws)
        return (draws - self.kernel @ self._pulled(mixed + torch.randn_like(mixed))).mT


def started(model: LinearModel, structure: str) -> Iterate:
    """Return the Laplace approximation about `w0`, over outputs if they are fewer than weights."""
    fewer = model.jacobian[..., 0].numel() < model.jacobian.shape[-1]
    # The kernel needs a prior on every weight.
    if structure == "full" and fewer and bool((model.prior_precision > 0).all()):
        return OutputIterate.start(model)
    blocks = model.local(model.outputs)[1]
    precision = STRUCTURES[structure](model.curvature(blocks, structure))
    return WeightIterate(model, structure, model.loc, precision)


@torch.no_grad()
def refine_variational(
    model: LinearModel,
    structure: str = "full",
    *,
    rate: float = 1e-2,
    num_steps: int = 250,
    num_draws: int = 2,
) -> Posterior:
    r"""Return a Gaussian near the best one for the linearised model, by natural gradients.

    `Lambda <- (1 - rho) Lambda + rho (sum_n J_n^T E_q[H_n] J_n + P0)`,
    `mu <- mu + rho Lambda^-1 (sum_n J_n^T E_q[r_n] - P0 (mu - m0))`, from the Laplace approximation
    about `w0`. A diagonal `Lambda` takes the diagonal of the bracket, and needs a small rate: with
    1 it can diverge where inputs are correlated.

    If all points together have fewer outputs than there are weights, a full `Lambda` is not formed,
    and a step takes time cubic in the number of outputs instead of weights. The Gaussian is the
    same, but not the random numbers for a given seed.

    Args:
        model: the linearised model.
        structure: of `Lambda`, `"full"` or `"diag"`.
        rate: `rho`, above 0 and at most 1.
        num_steps: number of updates.
        num_draws: number of draws of the weights for each expectation, from torch's generator, in
            pairs of a draw and its mirror image (so expectations of functions that are linear in
            the draw are exact).

    Returns:
        `mu`, `(P,)`, and `Lambda`; a full one is `LowRank` if outputs are fewer, else `Dense`.

    Raises:
        ValueError: an unknown structure; a rate out of range; no draws.
        RuntimeError: the steps diverge.

    References:
        [GLM] section 3.3; Khan & Rue (2023), The Bayesian learning rule.

    Example:
        A straight line through the origin with unit noise, where one step of rate 1 is exact:

        >>> import tyxe
        >>> x = torch.tensor([[-1.0], [1.0], [2.0]])
        >>> model = LinearModel(
        ...     x[:, None], torch.zeros(3, 1), torch.zeros(1), torch.zeros(1), torch.ones(1),
        ...     tyxe.likelihoods.HomoskedasticGaussian(3, scale=1.0), 2 * x)
        >>> mean, precision = refine_variational(model, rate=1.0, num_steps=1)
        >>> mean, precision.diagonal()  # 12 / 7, and 1 + 6
        (tensor([1.7143]), tensor([7.]))
    """
    check.choice("structure", structure, STRUCTURES)
    check.number("rate", rate, above=0, most=1)
    check.count("num_draws", num_draws)
    iterate = started(model, structure)
    for count in range(1, num_steps + 1):
        found = [model.local(outputs) for outputs in iterate.draws(num_draws)]
        residuals, blocks = (torch.stack(parts).mean(0) for parts in zip(*found, strict=True))
        moved = iterate.moved(residuals, blocks, rate)
        if moved is None:
            raise RuntimeError(
                f"refine: diverged at step {count} of {num_steps} with rate={rate}: use a smaller "
                "rate, or more draws"
            )
        iterate = moved
    return iterate.posterior()
