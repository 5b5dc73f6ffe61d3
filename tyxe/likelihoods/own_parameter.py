"""A positive parameter of a likelihood, such as the scale of noise."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.distributions.buffered import BufferedDistribution
from tyxe.likelihoods.base import Latents, Likelihood


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
            "sample_predictive, interval, predict or evaluate"
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
