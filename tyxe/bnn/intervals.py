"""Intervals that hold targets with a probability, of whatever draws predictive samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tyxe import check
from tyxe.likelihoods import Likelihood


class Intervals:
    """What follows from samples of the predictive distribution."""

    likelihood: Likelihood
    sample_predictive: Callable[..., Tensor]

    def draw_weights(self, count: int) -> Tensor | None:
        """Return how much each of so many draws counts, which sum to one; None for all alike.

        They are those of `predict(..., aggregate=False)`, and of use to what takes stacked draws,
        such as `tyxe.predictive.entropy_decomposition`.
        """
        return None

    def interval(
        self, *inputs: Any, level: float = 0.9, num_samples: int = 1000, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of intervals that hold targets with a probability, `(n, ...)` each.

        As many samples lie below as above; each number of a target has an interval of its own.
        Between two of `S` sorted samples another one lies with a probability of their distance over
        `S + 1`.

        Args:
            level: the probability, between 0 and 1.
            num_samples: number of samples of `sample_predictive`, which takes the other options; at
                least those whose range holds another with the probability, 19 for `level=0.9`.

        Raises:
            TypeError: the targets are classes, which have no order.
            ValueError: a level that is no probability.

        Example:
            >>> import torch, pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> lower, upper = bnn.interval(torch.zeros(5, 2), level=0.5)
            >>> bool((lower < upper).all())
            True
        """
        level = check.number("level", level, above=0, below=1)
        if not self.likelihood.has_order:
            raise TypeError(
                f"the targets of {type(self.likelihood).__name__} are classes, which have no order "
                "and so no interval: use predict(...).softmax(-1), or sample_predictive"
            )
        tail = (1 - level) / 2
        fewest = math.ceil(1 / tail - 1e-9) - 1
        num_samples = max(check.count("num_samples", num_samples), fewest)
        samples = self.sample_predictive(*inputs, num_samples=num_samples, **options).sort(0)[0]
        rank = math.floor(
            tail * (num_samples + 1) + 1e-9
        )  # a product such as 0.05 * 100 is rounded
        return samples[rank - 1], samples[-rank]
