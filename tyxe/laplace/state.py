"""A Laplace approximation as one immutable state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.laplace.evidence import log_evidence
from tyxe.laplace.online import key_of, prior_of_tasks, warn_of_copy
from tyxe.laplace.options import check_settings
from tyxe.laplace.precision import posterior_precision
from tyxe.linalg import BlockDiagonal
from tyxe.linalg.base import factorization


@dataclasses.dataclass(frozen=True, eq=False)
class LaplaceState:
    """`N(w*, Lambda^-1)` with `Lambda = lambda G / T + P0`, and the parts that it is formed from.

    It is immutable; `replace` and `under` return other states.

    Attributes:
        loc: `w*`, `(P,)`, in the order of `blocks`.
        curvature: `G`, with its blocks and the log-likelihood of the data.
        prior: `N(m0, P0^-1)` over the same blocks.
        temperature: `T`.
        curvature_weight: `lambda` of online Laplace.
        damping: whether the prior's precision is spread over both Kronecker factors [T 3.41].
        accumulate: how the curvatures of tasks are combined, `"sum"`, `"average"` or `"per_task"`.

    Raises:
        ValueError: a temperature or weight that is not positive; an unknown `accumulate`; sizes
            that do not fit.

    Reference:
        [T] 3.1-3.3; [LA].

    Example:
        One weight with the prior N(0, 1), and data with the log-likelihood `-3/2 (w - 2)^2`:

        >>> from tyxe.linalg import Diagonal
        >>> blocks = ParamBlocks.of_sites({"w": torch.Size([1])})
        >>> prior = Gaussian(blocks, torch.zeros(1), Diagonal(torch.ones(1)))
        >>> operator = BlockDiagonal({"w": Diagonal(torch.tensor([3.0]))})
        >>> curvature = Curvature(operator, blocks, -0.375, 0.0, 1.0, key=1)
        >>> state = LaplaceState(torch.tensor([1.5]), curvature, prior)
        >>> state.precision().diagonal()
        tensor([4.])
        >>> state.evidence()  # -3/2 2^2 / 4 - log(4) / 2
        tensor(-2.1931)
    """

    loc: Tensor
    curvature: Curvature
    prior: Gaussian
    temperature: float = 1.0
    curvature_weight: float = 1.0
    damping: bool = False
    accumulate: str = "sum"

    def __post_init__(self) -> None:
        check_settings(self.temperature, self.curvature_weight, self.accumulate)
        sizes = self.loc.numel(), self.prior.blocks.size
        if set(sizes) != {self.blocks.size}:
            raise ValueError(
                f"loc has {sizes[0]} elements and the prior {sizes[1]}; expected {self.blocks.size}"
                ", those of the curvature's blocks"
            )

    @property
    def blocks(self) -> ParamBlocks:
        """The layout of the weights in one vector."""
        return self.curvature.blocks

    @property
    def weight(self) -> float:
        """The factor of the curvature, `lambda / T`."""
        return self.curvature_weight / self.temperature

    @property
    def key(self) -> int:
        """Identifies the weighted curvature in posteriors that contain it, as their `absorbed`."""
        return key_of(self.curvature.key, self.weight)

    def precision(self) -> BlockDiagonal:
        """Return `Lambda`, which is computed once.

        Raises:
            ValueError: the curvature's structure, or damping, does not fit the prior.
        """
        return self._precision

    @factorization
    def _precision(self) -> BlockDiagonal:
        return posterior_precision(
            self.prior, self.curvature, self.weight, self.damping, self.accumulate
        )

    def evidence(self) -> Tensor:
        """Return the log marginal likelihood, in nats, differentiable in the prior and the noise.

        Raises:
            ValueError: the prior is a penalty whose normaliser is not known.
        """
        return log_evidence(
            self.curvature.log_likelihood,
            self.prior,
            self.loc,
            self.precision(),
            self.temperature,
        )

    def posterior(self) -> Gaussian:
        """Return `N(w*, Lambda^-1)`."""
        return Gaussian(self.blocks, self.loc, self.precision(), self.key)

    def next_prior(self) -> Gaussian:
        """Return the prior of a next task, with the key of the curvature that it contains.

        It is the posterior, or with `accumulate="per_task"` the prior times a term about `w*`, that
        is a penalty for each task [T 3.71]; for diagonals this is elastic weight consolidation.
        """
        if self.accumulate != "per_task":
            return self.posterior()
        return prior_of_tasks(self.prior, self.loc, self.curvature, self.weight, self.key)

    def replace(self, **changes: Any) -> LaplaceState:
        """Return the state with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def under(self, prior: Gaussian) -> LaplaceState:
        """Return the state under another prior.

        If the prior is this state's `next_prior`, it contains the curvature, which is emptied: the
        posterior stays the same, and the next curvature is added to it [T 3.56]. A copy of its
        numbers, which does not say so, gives a warning.

        Raises:
            ValueError: the prior has other sites, or too many coupled weights in another order.
        """
        found = prior.reordered(self.blocks)
        if prior.absorbed == self.key:
            return self.replace(prior=found, curvature=self.curvature.emptied())
        warn_of_copy(self.prior, found, self.loc)
        return self.replace(prior=found)

    @torch.no_grad()
    def sample(self) -> dict[str, Tensor]:
        """Return one draw of `w - w*` by site."""
        return self.blocks.unflatten(self.precision().sample())

    def map(self, function: Callable[[Tensor], Tensor]) -> LaplaceState:
        """Return the state with a function of each of its tensors, such as a move to a device."""
        return self.replace(
            loc=function(self.loc),
            curvature=self.curvature.map(function),
            prior=self.prior.map(function),
        )
