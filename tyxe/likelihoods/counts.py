"""Counts: with the variance of their mean, or with a larger one."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch.distributions as td
from torch import Tensor

from tyxe.likelihoods.base import Latents, Likelihood
from tyxe.likelihoods.own_parameter import OwnParameter
from tyxe.likelihoods.reductions import log_mean_exp, stacked


class _LogMean(Likelihood):
    """What likelihoods share whose predictions are logs of a mean."""

    has_squared_errors = True

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return (predictions.exp() - targets).square()

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Tensor:
        return log_mean_exp(stacked(predictions, dim), dim, weights)


class Poisson(_LogMean):
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

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        return dist.Poisson(predictions.exp(), validate_args=False).to_event(self.event_dim)


class NegativeBinomial(_LogMean, OwnParameter):
    """Counts that vary more than those of a Poisson; predictions are logs of the mean, `(n, ...)`.

    With the mean `mu` the variance is `mu + mu^2 / total_count`. Aggregated predictions are the log
    of the mean over draws. The other arguments are those of `Likelihood`.

    Args:
        total_count: a positive number, the larger the closer to a Poisson; a tensor that broadcasts
            against one point's prediction; or a distribution, as the scale of
            `HomoskedasticGaussian`.
        learn_total_count: train it with the net, from the number or tensor given.

    Raises:
        ValueError: a number that is not positive; a target that is negative or no whole number.

    Example:
        >>> import torch
        >>> likelihood = NegativeBinomial(100, total_count=2.0)
        >>> counts = likelihood.predictive_distribution(torch.tensor([3.0]).log())
        >>> counts.mean, counts.variance
        (tensor([3.]), tensor([7.5000]))
    """

    called = "total_count"

    def __init__(
        self,
        dataset_size: float | None = None,
        total_count: float | Tensor | td.Distribution = 1.0,
        event_dim: int = 0,
        name: str = "likelihood",
        *,
        learn_total_count: bool = False,
    ) -> None:
        how = learn_total_count, dataset_size, event_dim, name
        super().__init__("total_count", total_count, *how)

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        count = self.own_value_for(predictions, latents)
        logits = predictions - count.log()
        found = dist.NegativeBinomial(count, logits=logits, validate_args=False)
        return found.to_event(self.event_dim)
