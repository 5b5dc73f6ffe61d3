"""The case to diagnose: a BNN, its data, and its predictions of them, computed once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tyxe.bnn import EnsembleBNN
from tyxe.bnn.batches import all_batches, check_iterable, copied, device_for
from tyxe.bnn.scoring import Predicted, predicted, weights_of
from tyxe.data import Unpack
from tyxe.errors import TyxeWarning
from tyxe.likelihoods import Likelihood, StudentT
from tyxe.metrics import gaussian_pit
from tyxe.poutine import local_reparameterization


@dataclass(eq=False)
class Case:
    """A BNN and its data.

    Attributes:
        bnn: the BNN.
        train: batches of training data, as evaluations take them: about as many as are held out.
        to_fit: all batches of training data, as fits take them.
        held_out: batches of held-out data.
        options: of `predict` and `evaluate`.
        beta: weight of the KL in the fit.
        plain: the net of maximum likelihood, as a fitted BNN, or None.
    """

    bnn: Any
    train: list[Any]
    to_fit: list[Any]
    held_out: list[Any]
    options: dict[str, Any]
    beta: float
    plain: Any = None

    @classmethod
    def of(
        cls,
        bnn: Any,
        train: Iterable[Any],
        held_out: Iterable[Any],
        unpack: Unpack | None,
        options: dict[str, Any],
        beta: float,
        plain: Any = None,
    ) -> Case:
        """Read loaders once, onto the BNN's device."""
        device = device_for(bnn)
        one = members_of(bnn)[0]
        for loader in (train, held_out):
            check_iterable(loader)
        data, unseen = ([*map(copied, own)] for own in (train, held_out))
        evaluated, fitted, seen = (
            all_batches(read(loader, unpack), device)
            for read, loader in (
                (bnn._to_evaluate, data),
                (one._to_fit, data),
                (bnn._to_evaluate, unseen),
            )
        )
        # Evaluations of all training data would be what takes the time.
        spaced = evaluated[:: max(len(evaluated) // max(len(seen), 1), 1)]
        return cls(bnn, spaced, fitted, seen, options, beta, plain)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of all members."""
        found: Likelihood = self.bnn.likelihood
        return found

    @cached_property
    def fitted(self) -> Tensor:
        """Log-likelihoods of training data, those of `seen`."""
        return log_likelihoods(self.bnn, self.train, **self.options)

    @cached_property
    def seen(self) -> Tensor:
        """Log-likelihoods of held-out data, in nats: of points, or of points by draw `(S, n)`."""
        return log_likelihoods(self.bnn, self.held_out, **self.options)

    @cached_property
    def predicted(self) -> Predicted:
        """Predictions of held-out data, beside their targets."""
        return predicted(self.bnn, self.held_out, **self.options)

    def mean(self, logs: Tensor, batches: list[Any]) -> float:
        """Return the mean over points, by their weights, of the mixture over draws."""
        each, weights = mixed(logs), self.weights(batches)
        return float((each * weights.to(each)).sum() / weights.sum())

    def weights(self, batches: list[Any]) -> Tensor:
        """Return how often each point of batches counts, of those that do."""
        return torch.cat([weights_of(self.likelihood, targets) for _, targets in batches])


@contextmanager
def spared() -> Iterator[None]:
    """Use local reparameterisation without its warnings about other maps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TyxeWarning)
        with local_reparameterization():
            yield


def members_of(bnn: Any) -> list[Any]:
    """Return the members of an ensemble, or the BNN itself."""
    return list(bnn.members) if isinstance(bnn, EnsembleBNN) else [bnn]


def log_likelihoods(bnn: Any, batches: list[Any], **options: Any) -> Tensor:
    """Return log-likelihoods, in nats: of points by draw `(S, n)`, or of points `(n,)`."""
    if not isinstance(bnn, EnsembleBNN):
        options["aggregate"] = False
    _, found = bnn.evaluate(batches, reduction="none", **options)
    together: Tensor = found["joint"] if isinstance(found, dict) else found
    return together.double()


def mixed(logs: Tensor) -> Tensor:
    """Return the log-likelihoods of points under the mixture over draws."""
    return logs.logsumexp(0) - math.log(len(logs)) if logs.dim() == 2 else logs


def integral_transform(judged: Predicted) -> tuple[Tensor, Tensor | None]:
    """Return how probable it is to be below each number that counts, `(m,)`, and their counts."""
    mean, scale, y, counts = judged.numbers()
    if not isinstance(judged.likelihood, StudentT):
        return gaussian_pit(mean, scale, y), counts
    df = judged.likelihood.df
    # With t = sqrt(df) tan(a), the density of a is proportional to cos(a)^(df - 1).
    angles = torch.linspace(0, math.pi / 2, 4097, dtype=torch.float64, device=y.device)
    below = torch.cumulative_trapezoid(angles.cos() ** (df - 1), angles)
    below = torch.cat([torch.zeros_like(below[:1]), below / below[-1]])
    t = (y - mean).double() / scale * math.sqrt(df / (df - 2))
    places = (t.abs() / math.sqrt(df)).atan() / angles[1]
    index = places.long().clamp(max=len(below) - 2)
    shares = below[index].lerp(below[index + 1], places - index)
    return (0.5 + 0.5 * t.sign() * shares).to(mean), counts
