"""The likelihood of counts."""

from __future__ import annotations

from collections.abc import Mapping

import pyro.distributions as dist
from torch import Tensor

from tyxe.likelihoods.base import Likelihood, log_mean_exp


class Poisson(Likelihood):
    """Counts with a log link: predictions are log-rates `(n, ...)`, one for each target.

    Aggregated predictions are the log of the mean rate. Arguments are those of `Likelihood`.

    Raises:
        ValueError: a target that is negative or no whole number.

    Example:
        >>> import torch
        >>> likelihood = Poisson(dataset_size=100)
        >>> likelihood.aggregate_predictions(torch.tensor([[1.0], [3.0]]).log()).exp()
        tensor([2.])
    """

    def __init__(
        self, dataset_size: int | None = None, event_dim: int = 0, name: str = "likelihood"
    ) -> None:
        super().__init__(dataset_size, event_dim, name)

    def predictive_distribution(
        self, predictions: Tensor, latents: Mapping[str, Tensor] | None = None
    ) -> dist.Distribution:
        return dist.Poisson(predictions.exp(), validate_args=False).to_event(self.event_dim)

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return (predictions.exp() - targets).square()

    def aggregate_predictions(
        self,
        predictions: Tensor,
        dim: int = 0,
        latents: Mapping[str, Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        return log_mean_exp(predictions, dim, weights)
