"""Gaussian likelihoods, with one noise scale or with a predicted one."""

from __future__ import annotations

from numbers import Real
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn.functional import softplus

from tyxe.data import Targets
from tyxe.distributions.buffered import BufferedDistribution
from tyxe.likelihoods.base import Latents, Likelihood, Predictions, mean_of, mean_over


class HomoskedasticGaussian(Likelihood):
    """Gaussian noise of one scale for all points; predictions are means `(n, ...)`.

    Aggregated predictions are `(mean, scale)`, mean and standard deviation of the mixture over
    draws, noise included. The other arguments are those of `Likelihood`.

    Args:
        scale: standard deviation of the noise: a positive number, a tensor that broadcasts
            against one point's prediction, or a distribution: then it is a site,
            `likelihood.scale`, to be inferred (give the BNN a `likelihood_guide_builder`).
        precision: `1 / scale^2`, given instead of `scale`.
        learn_scale: train the noise with the net, from the number or tensor given; it stays
            positive, because its logarithm is the parameter. A `torch.nn.Parameter` asks for it.

    Raises:
        ValueError: both or neither of scale and precision; a number that is not positive; a
            distribution with `learn_scale`.

    Example:
        >>> likelihood = HomoskedasticGaussian(100, scale=0.3)
        >>> likelihood.aggregate_predictions(torch.tensor([[[0.0]], [[0.8]]]))
        (tensor([[0.4000]]), tensor([[0.5000]]))
    """

    noise: Tensor | None

    def __init__(
        self,
        dataset_size: int | None = None,
        scale: float | Tensor | td.Distribution | None = None,
        precision: float | Tensor | td.Distribution | None = None,
        event_dim: int = 1,
        name: str = "likelihood",
        *,
        learn_scale: bool = False,
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        if (scale is None) == (precision is None):
            raise ValueError(
                "HomoskedasticGaussian takes either scale or precision, and exactly one of them"
            )
        self.parameter = "scale" if precision is None else "precision"
        given = scale if precision is None else precision
        self.noise_prior = (
            BufferedDistribution(given) if isinstance(given, td.Distribution) else None
        )
        learn = learn_scale or isinstance(given, nn.Parameter)
        if self.noise_prior is None:
            values = torch.as_tensor(given).detach()
            if not bool((values > 0).all() & values.isfinite().all()):
                raise ValueError(f"{self.parameter} is {given}; expected positive numbers")
        elif learn:
            raise ValueError(
                f"{self.parameter} is a distribution, so it is inferred; learn_scale takes a number"
            )
        self.log_noise = nn.Parameter(values.log()) if learn else None
        # Kept as a number, so that a float64 net gets it unrounded.
        self._number = float(given) if isinstance(given, Real) and not learn else None
        fixed = given.detach().clone() if isinstance(given, Tensor) and not learn else None
        self.register_buffer("noise", fixed)

    def extra_repr(self) -> str:
        noise: Any = self._number
        if self.noise_prior is not None:
            noise = self.noise_prior.distribution
        elif self.log_noise is not None:
            noise = f"{tuple(self.log_noise.shape)} parameter"
        elif self.noise is not None:
            noise = f"{tuple(self.noise.shape)} tensor"
        return f"{super().extra_repr()}, {self.parameter}={noise}"

    def latent_priors(self) -> dict[str, td.Distribution]:
        if self.noise_prior is None:
            return {}
        return {self.parameter: self.noise_prior.distribution}

    @property
    def scale(self) -> Tensor:
        """Standard deviation of the noise; where it is inferred, that of the prior's mean."""
        return self.scale_of(self.prior_means())

    @property
    def precision(self) -> Tensor:
        """One over the squared standard deviation."""
        return self.scale.square().reciprocal()

    def scale_of(self, latents: Latents = None, like: Tensor | None = None) -> Tensor:
        """Return the noise's standard deviation.

        Args:
            latents: a value of the inferred variable.
            like: a tensor with the dtype and device that a number is returned in.

        Raises:
            ValueError: the noise is inferred, and has no value.
        """
        if self._number is not None:
            like = torch.empty((), device="cpu") if like is None else like
            noise = torch.full((), self._number, dtype=like.dtype, device=like.device)
        elif self.noise is not None:
            noise = self.noise
        elif self.log_noise is not None:
            noise = self.log_noise.exp()
        elif latents and self.parameter in latents:
            noise = latents[self.parameter]
        else:
            raise ValueError(
                f"the noise is inferred, and its prior alone says nothing of it: pass its draws, "
                f"latents={{{self.parameter!r}: ...}}, or let the BNN do it, by sample_predictive, "
                "interval, predict or evaluate"
            )
        return noise if self.parameter == "scale" else noise.rsqrt()

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        if isinstance(predictions, tuple):
            loc, scale = predictions
        else:
            loc, noise = predictions, self.scale_of(latents, predictions).to(predictions.dtype)
            try:
                scale = noise.expand_as(loc)
            except RuntimeError:
                raise ValueError(
                    f"the noise has shape {tuple(noise.shape)} and predictions have shape "
                    f"{tuple(loc.shape)}; give one number, or one for each output of the net"
                ) from None
        event_dim = min(self.event_dim, max(loc.dim() - 1, 0))
        return dist.Normal(loc, scale, validate_args=False).to_event(event_dim)

    def point_error(self, predictions: Predictions, targets: Tensor) -> Tensor:
        return (mean_of(predictions) - targets).square()

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        noise = self.scale_of(latents, predictions).square()
        if self.noise_prior is not None:
            noise = mean_over(noise, 0, weights)
        mean, spread = _moments(predictions, dim, weights)
        return mean, (spread + noise.to(predictions.dtype)).sqrt()


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

    def __init__(
        self,
        dataset_size: int | None = None,
        positive_scale: bool = False,
        event_dim: int = 1,
        name: str = "likelihood",
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.positive_scale = positive_scale

    def _split(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        if predictions.dim() < 2 or predictions.shape[-1] % 2:
            raise ValueError(
                f"HeteroskedasticGaussian got predictions of shape {tuple(predictions.shape)}; "
                "expected (n, ..., 2 d): a mean and a scale for each of d targets"
            )
        loc, scale = predictions.chunk(2, dim=-1)
        return loc, scale if self.positive_scale else softplus(scale)

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
        loc, scale = self._split(predictions)
        mean, spread = _moments(loc, dim, weights)
        total = (spread + mean_over(scale.square(), dim, weights)).sqrt()
        if not self.positive_scale:
            # The inverse of softplus: x + log(1 - exp(-x)).
            total = total + torch.log(-torch.expm1(-total))
        return torch.cat([mean, total], dim=-1)


def _moments(draws: Tensor, dim: int, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance over draws, where one draw has the variance 0."""
    mean = mean_over(draws, dim, weights)
    return mean, mean_over((draws - mean.unsqueeze(dim)).square(), dim, weights)
