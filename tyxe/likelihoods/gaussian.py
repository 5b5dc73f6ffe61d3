"""Numbers with Gaussian or heavy-tailed noise, of one scale of their own or a predicted one."""

from __future__ import annotations

import math
from abc import abstractmethod
from numbers import Real
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn.functional import softplus

from tyxe import check
from tyxe.data import Targets
from tyxe.distributions.buffered import BufferedDistribution
from tyxe.likelihoods.base import Latents, Likelihood, Predictions
from tyxe.likelihoods.reductions import mean_of, mean_over, moments, stacked
from tyxe.util import precise


class OwnParameter(Likelihood):
    """Base of likelihoods with a positive parameter, or one for each output of the net.

    It is fixed, or trained with the net through its logarithm, or a site with a prior.
    """

    noise: Tensor | None
    called = "noise"  # in messages

    def __init__(
        self,
        parameter: str,
        given: float | Tensor | td.Distribution,
        learn: bool,
        dataset_size: float | None,
        event_dim: int,
        name: str,
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.parameter = parameter
        self.noise_prior = (
            BufferedDistribution(given) if isinstance(given, td.Distribution) else None
        )
        learn = check.flag("learn", learn) or isinstance(given, nn.Parameter)
        if self.noise_prior is None:
            values = check.tensor(parameter, given).detach()
            check.numbers(parameter, values, "positive numbers", above=0)
        elif learn:
            raise ValueError(
                f"{parameter} is a distribution, so it is inferred; to learn it takes a number"
            )
        self.log_noise = nn.Parameter(values.log()) if learn else None
        # Kept as a number, so that a float64 net gets it unrounded.
        self._number = float(given) if isinstance(given, Real) and not learn else None
        fixed = given.detach().clone() if isinstance(given, Tensor) and not learn else None
        self.register_buffer("noise", fixed)

    def extra_repr(self) -> str:
        own: Any = self._number
        if self.noise_prior is not None:
            own = self.noise_prior.distribution
        elif self.log_noise is not None:
            own = f"{tuple(self.log_noise.shape)} parameter"
        elif self.noise is not None:
            own = f"{tuple(self.noise.shape)} tensor"
        return f"{super().extra_repr()}, {self.parameter}={own}"

    def latent_priors(self) -> dict[str, td.Distribution]:
        if self.noise_prior is None:
            return {}
        return {self.parameter: self.noise_prior.distribution}

    def own_value(self, latents: Latents = None, like: Tensor | None = None) -> Tensor:
        """Return the number, or numbers; a ValueError where an inferred one has no value.

        A number is returned in the dtype and on the device of `like`.
        """
        if self._number is not None:
            like = torch.empty((), device="cpu") if like is None else like
            return torch.full((), self._number, dtype=like.dtype, device=like.device)
        if self.noise is not None:
            return self.noise
        if self.log_noise is not None:
            return self.log_noise.exp()
        if latents and self.parameter in latents:
            return latents[self.parameter]
        raise ValueError(
            f"the {self.called} is inferred, and its prior alone says nothing of it: pass its "
            f"draws, latents={{{self.parameter!r}: ...}}, or let the BNN do it, by "
            "sample_predictive, interval, predictive, predict or evaluate"
        )

    def own_value_for(self, predictions: Tensor, latents: Latents = None) -> Tensor:
        """Return the number of each output, of the predictions' shape and dtype."""
        return expanded(self.own_value(latents, predictions), predictions, self.called)


def expanded(values: Tensor, predictions: Tensor, name: str) -> Tensor:
    """Return numbers of each output, of the predictions' shape and dtype; a ValueError if not."""
    try:
        return values.to(predictions.dtype).expand_as(predictions)
    except RuntimeError:
        raise ValueError(
            f"the {name} has shape {tuple(values.shape)} and predictions have shape "
            f"{tuple(predictions.shape)}; give one number, or one for each output of the net"
        ) from None


def log_prob_in_double(kind: Any, value: Tensor, **parameters: Tensor) -> Tensor:
    """Return a log-density of which terms of 1e8 may cancel, in the parameters' dtype."""
    exact = {name: precise(parameter) for name, parameter in parameters.items()}
    found: Tensor = kind(**exact, validate_args=False).log_prob(precise(value))
    return found.to(next(iter(parameters.values())).dtype)


class _Noisy(OwnParameter):
    """Base of noise of one scale for all points, about what the net predicts."""

    has_squared_errors = True

    @abstractmethod
    def _variance(self, latents: Latents, like: Tensor) -> Tensor:
        """Return the variance of the noise."""

    def point_error(self, predictions: Predictions, targets: Tensor) -> Tensor:
        return (mean_of(predictions) - targets).square()

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        noise = self._variance(latents, stacked(predictions, dim))
        if self.noise_prior is not None:  # one of each draw
            noise = mean_over(noise, 0, weights)
        mean, spread = moments(predictions, dim, weights)
        return mean, (spread + noise.to(predictions.dtype)).sqrt()


class HomoskedasticGaussian(_Noisy):
    """Gaussian noise of one scale for all points; predictions are means `(n, ...)`.

    Aggregated predictions are `(mean, scale)`, mean and standard deviation of the mixture over
    draws, noise included. The other arguments are those of `Likelihood`.

    Args:
        scale: standard deviation of the noise: a positive number, a tensor that broadcasts against
            one point's prediction, or a distribution: then it is a site, `likelihood.scale`, and is
            inferred (give the BNN a `likelihood_guide_builder`).
        precision: `1 / scale^2`, given instead of `scale`.
        learn_scale: train the noise with the net, from the number or tensor given. It stays
            positive, because its logarithm is the parameter. A `torch.nn.Parameter` implies it.

    Raises:
        ValueError: both or neither of scale and precision; a number that is not positive; a
            distribution with `learn_scale`.

    Example:
        >>> likelihood = HomoskedasticGaussian(100, scale=0.3)
        >>> likelihood.aggregate_predictions(torch.tensor([[[0.0]], [[0.8]]]))
        (tensor([[0.4000]]), tensor([[0.5000]]))
    """

    def __init__(
        self,
        dataset_size: float | None = None,
        scale: float | Tensor | td.Distribution | None = None,
        precision: float | Tensor | td.Distribution | None = None,
        event_dim: int = 1,
        name: str = "likelihood",
        *,
        learn_scale: bool = False,
    ) -> None:
        if (scale is None) == (precision is None):
            raise ValueError(
                "HomoskedasticGaussian takes either scale or precision, and exactly one of them"
            )
        parameter, given = ("precision", precision) if scale is None else ("scale", scale)
        assert given is not None
        super().__init__(parameter, given, learn_scale, dataset_size, event_dim, name)

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the noise; if it is inferred, the prior's mean."""
        return self.scale_of(self.prior_means())

    @property
    def precision(self) -> Tensor:
        """One over the squared standard deviation."""
        return self.scale.square().reciprocal()

    def scale_of(self, latents: Latents = None, like: Tensor | None = None) -> Tensor:
        """Return the noise's standard deviation.

        Args:
            latents: a value of the inferred variable.
            like: a tensor whose dtype and device a number gets.

        Raises:
            ValueError: the noise is inferred, and has no value.
        """
        noise = self.own_value(latents, like)
        return noise if self.parameter == "scale" else noise.rsqrt()

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        if isinstance(predictions, tuple):
            loc, scale = predictions
        else:
            loc, scale = predictions, self.scale_of(latents, predictions)
            scale = expanded(scale, loc, self.called)
        event_dim = min(self.event_dim, max(loc.dim() - 1, 0))
        return dist.Normal(loc, scale, validate_args=False).to_event(event_dim)

    def _variance(self, latents: Latents, like: Tensor) -> Tensor:
        return self.scale_of(latents, like).square()


class StudentT(_Noisy):
    """Noise with heavy tails, of one scale for all points; predictions are locations `(n, ...)`.

    Outliers move a fit less than with a Gaussian. Aggregated predictions are
    `(mean, standard deviation)` of the mixture over draws, noise included, and represent a Student
    t with these moments. The other arguments are those of `Likelihood`.

    Args:
        scale: scale of the noise, whose standard deviation is `scale * sqrt(df / (df - 2))`: a
            positive number, a tensor, or a distribution, as for `HomoskedasticGaussian`.
        df: degrees of freedom, above 2; a Gaussian has infinitely many.
        learn_scale: train the scale with the net.

    Raises:
        ValueError: a scale that is not positive; `df` of 2 or less, where there is no variance.

    Example:
        >>> likelihood = StudentT(100, scale=0.3, df=4.0)
        >>> likelihood.aggregate_predictions(torch.tensor([[[0.0]], [[0.8]]]))
        (tensor([[0.4000]]), tensor([[0.5831]]))
    """

    def __init__(
        self,
        dataset_size: float | None = None,
        scale: float | Tensor | td.Distribution = 1.0,
        df: float = 4.0,
        event_dim: int = 1,
        name: str = "likelihood",
        *,
        learn_scale: bool = False,
    ) -> None:
        super().__init__("scale", scale, learn_scale, dataset_size, event_dim, name)
        self.df = check.number("df", df, above=2, hint=": without a variance nothing aggregates")

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        if isinstance(predictions, tuple):
            loc, scale = predictions[0], predictions[1] * math.sqrt(1 - 2 / self.df)
        else:
            loc, scale = predictions, self.own_value_for(predictions, latents)
        event_dim = min(self.event_dim, max(loc.dim() - 1, 0))
        return _StudentT(self.df, loc, scale, validate_args=False).to_event(event_dim)

    def _variance(self, latents: Latents, like: Tensor) -> Tensor:
        return self.own_value(latents, like).square() / (1 - 2 / self.df)


class _StudentT(dist.StudentT):
    """A StudentT whose density is precise for many degrees of freedom too."""

    def log_prob(self, value: Tensor) -> Tensor:
        given = {"df": self.df, "loc": self.loc, "scale": self.scale}
        return log_prob_in_double(dist.StudentT, value, **given)


class HeteroskedasticGaussian(Likelihood):
    """Gaussian noise whose scale the net predicts.

    Predictions `(n, ..., 2 d)` hold means in the first half of the last dimension and scales in
    the second (through a softplus unless `positive_scale`); targets are `(n, ..., d)`. Aggregated
    predictions have the same layout and hold mean and standard deviation of the mixture over
    draws. The other arguments are those of `Likelihood`.

    Args:
        positive_scale: the second half of the net's output is already positive.

    Raises:
        ValueError: predictions whose last dimension is odd.

    Example:
        >>> likelihood = HeteroskedasticGaussian(100, positive_scale=True)
        >>> likelihood.aggregate_predictions(torch.tensor([[[0.0, 0.3]], [[0.8, 0.3]]]))
        tensor([[0.4000, 0.5000]])
    """

    has_squared_errors = True

    def __init__(
        self,
        dataset_size: float | None = None,
        positive_scale: bool = False,
        event_dim: int = 1,
        name: str = "likelihood",
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.positive_scale = positive_scale

    @property
    def bounded_outputs(self) -> str:
        return "positive scales" if self.positive_scale else ""

    def _split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        if predictions.dim() < 2 or predictions.shape[-1] % 2:
            raise ValueError(
                f"HeteroskedasticGaussian got predictions of shape {tuple(predictions.shape)}; "
                "expected (n, ..., 2 d): a mean and a scale for each of d targets"
            )
        loc, scale = predictions.chunk(2, dim=-1)
        scale = scale if self.positive_scale else softplus(scale)
        # A softplus rounds to 0, and the square of smaller ones too. A net's own may be negative.
        least = torch.finfo(scale.dtype).tiny ** 0.5
        return loc, scale.where(scale < 0, scale.clamp_min(least))

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        loc, scale = self._split(predictions)
        return dist.Normal(loc, scale, validate_args=False).to_event(self.event_dim)

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return (self._split(predictions)[0] - targets).square()

    def output_counts(self, targets: Tensor | Targets, outputs: Tensor) -> Tensor | None:
        counts = self.observed(targets).counts_within()
        return None if counts is None else torch.cat([counts, counts], -1)

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Tensor:
        loc, scale = self._split(stacked(predictions, dim))
        mean, spread = moments(loc, dim, weights)
        total = (spread + mean_over(scale.square(), dim, weights)).sqrt()
        if not self.positive_scale:
            # The inverse of softplus: x + log(1 - exp(-x)).
            total = total + torch.log(-torch.expm1(-total))
        return torch.cat([mean, total], dim=-1)
