"""Counts, with the variance of their mean or a larger one, and ordered classes such as grades."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from tyxe import check
from tyxe.likelihoods.base import Latents, Likelihood
from tyxe.likelihoods.discrete import LogitCategorical
from tyxe.likelihoods.gaussian import OwnParameter, log_prob_in_double
from tyxe.likelihoods.reductions import log_mean_exp, stacked
from tyxe.util import at_least_float32, precise


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
        return _Poisson(predictions).to_event(self.event_dim)


class _Poisson(dist.Poisson):
    """A Poisson whose density is precise for large counts, and rates that single rounds to 0."""

    def __init__(self, log_rate: Tensor) -> None:
        self._log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Poisson:
        return _Poisson(self._log_rate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        # Terms of 1e8 cancel.
        log_rate, value = precise(self._log_rate), precise(value)
        counted = (value * log_rate).where(value != 0, 0.0)
        return (counted - log_rate.exp() - (value + 1).lgamma()).to(self.rate.dtype)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return _drawn(self.rate.expand(self._extended_shape(torch.Size(sample_shape))))


def _drawn(rate: Tensor) -> Tensor:
    """Return counts, which above some rate are the rate: PyTorch's integers end at 2^63 or 2^32."""
    most = min(1e18 if rate.device.type == "cpu" else 2e9, torch.finfo(rate.dtype).max)
    return torch.poisson(rate.clamp_max(most)).where(rate < most, rate)


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
        # From here on it is a Poisson of means up to 1e5, but for rounding. A prior may have an
        # infinite mean.
        count = self.own_value_for(predictions, latents).clamp_max(1e9)
        logits = predictions - count.log()
        return _Dispersed(count, logits=logits, validate_args=False).to_event(self.event_dim)


class _Dispersed(dist.NegativeBinomial):
    """A NegativeBinomial whose density is precise for large counts too."""

    def log_prob(self, value: Tensor) -> Tensor:
        given = {"total_count": self.total_count, "logits": self.logits}
        return log_prob_in_double(dist.NegativeBinomial, value, **given)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return _drawn(self._gamma.sample(sample_shape))


class Ordinal(Likelihood):
    """One of `K` ordered classes; predictions are one number `(n, ..., 1)` for each target.

    `p(y <= k) = sigmoid(c_k - f)`, with cut points `c_1 < ... < c_(K-1)` that are trained with the
    net, as `c_1` and `log(c_k - c_(k-1))`. Targets are integers `(n, ...)` from 0. Aggregated
    predictions are logs of the mean probabilities, `(n, ..., K)`, and errors misclassifications.
    The other arguments are those of `Likelihood`.

    Args:
        num_classes: `K`, 2 or more.
        cut_points: where they start, `(K - 1,)`; by default at quantiles of a logistic
            distribution, so that all classes are equally likely for the output 0.
            `likelihood.requires_grad_(False)` keeps them fixed, which MCMC needs.

    Raises:
        TypeError: `num_classes` is not an integer.
        ValueError: a wrong number of cut points, or cut points that do not increase; predictions
            whose last dimension is not 1; a target outside `0 ... K - 1`.

    Example:
        >>> likelihood = Ordinal(100, num_classes=3, cut_points=torch.tensor([-1.0, 1.0]))
        >>> likelihood.class_logits(torch.zeros(1, 1)).exp().detach()
        tensor([[0.2689, 0.4621, 0.2689]])
    """

    has_classes = is_zero_outside = True

    def __init__(
        self,
        dataset_size: float | None,
        num_classes: int,
        event_dim: int = 0,
        name: str = "likelihood",
        *,
        cut_points: Tensor | None = None,
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.num_classes = check.count("num_classes", num_classes, 2)
        if cut_points is None:
            cut_points = (torch.arange(1, num_classes, device="cpu") / num_classes).logit()
        cuts = check.tensor("cut_points", cut_points).detach()
        check.shape("cut_points", cuts, (num_classes - 1,), ", one less than classes")
        check.numbers("cut_points", cuts, "finite numbers")
        gaps = check.numbers("a step of cut_points", cuts.diff(), "numbers that grow", above=0)
        self.first_cut, self.log_gaps = nn.Parameter(cuts[0].clone()), nn.Parameter(gaps.log())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_classes={self.num_classes}"

    @property
    def cut_points(self) -> Tensor:
        """The increasing numbers between classes, `(K - 1,)`."""
        return self.cut_points_as(self.log_gaps.dtype)

    def cut_points_as(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers between classes, computed in a dtype."""
        return self.first_cut.to(dtype) + pad(self.log_gaps.to(dtype).exp().cumsum(0), (1, 0))

    @check.arguments
    def class_logits(self, predictions: Tensor) -> Tensor:
        """Return logs of the probabilities of classes, also of aggregated predictions."""
        predictions = at_least_float32(predictions)
        if predictions.dim() > 1 and predictions.shape[-1] == self.num_classes:
            return predictions.log_softmax(-1)
        self.check_predictions(predictions)
        logits = self.cut_points_as(predictions.dtype) - predictions  # of y <= k
        # sigma(b) - sigma(a) = sigma(b) sigma(-a) (1 - exp(a - b))
        between = pad((-torch.expm1(-self.log_gaps.to(logits).exp())).log(), (1, 1))
        return pad(logsigmoid(logits), (0, 1)) + pad(logsigmoid(-logits), (1, 0)) + between

    def check_predictions(self, predictions: Tensor) -> None:
        """Raise unless there is one number for each target."""
        hint = ", one number for each target"
        check.shape("what Ordinal got as predictions", predictions, ("n", ..., 1), hint)

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        return LogitCategorical(self.class_logits(predictions)).to_event(self.event_dim)

    def prepare_targets(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return targets if targets.is_floating_point() else targets.long()

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return (self.class_logits(predictions).argmax(-1) != targets).to(predictions.dtype)

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Tensor:
        return log_mean_exp(self.class_logits(stacked(predictions, dim)), dim, weights)
