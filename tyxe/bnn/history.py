"""The report of a fit."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["History"]


@dataclass
class History:
    """Averages over each epoch, in nats for the whole data set.

    Attributes:
        loss: `beta * kl - log_likelihood`, the negative ELBO for `beta = 1`.
        log_likelihood: expected log-likelihood of the data.
        kl: divergence of the guide from the prior.

    Example:
        >>> history = History()
        >>> history.append(loss=3.0, log_likelihood=-1.0, kl=2.0)
        >>> history.loss
        [3.0]
    """

    loss: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def append(self, *, loss: float, log_likelihood: float, kl: float) -> None:
        """Add an epoch."""
        self.loss.append(loss)
        self.log_likelihood.append(log_likelihood)
        self.kl.append(kl)
