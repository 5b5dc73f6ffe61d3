"""Class labels and binary labels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import probs_to_logits
from torch.nn.functional import logsigmoid, nll_loss, one_hot

from tyxe import check
from tyxe.data import Targets
from tyxe.errors import warn
from tyxe.likelihoods.base import Latents, Likelihood
from tyxe.likelihoods.reductions import log_mean_exp, mean_over, stacked
from tyxe.util import at_least_float32, without_events

TOLERANCE = 1e-3  # of sums of probabilities


class Categorical(Likelihood):
    """One of `C` classes; predictions are class logits `(n, ..., C)`, targets integers `(n, ...)`.

    Targets may also be class probabilities `(n, ..., C)`, such as from label smoothing, with the
    log-likelihood `sum_c q_c log p_c`. Aggregated predictions are logits too: the log of the mean
    probabilities (or probabilities for `logit_predictions=False`). The other arguments are those of
    `Likelihood`.

    Args:
        logit_predictions: the net returns logits; probabilities for `False`.
        ignore_index: a label that is ignored in fits and their scale, in errors and
            log-likelihoods, such as -100 for padded tokens and pixels without a label.
        class_weights: `(C,)`, how much labels of each class count in fits; evaluations do not use
            them. With the mean 1 over the data, `dataset_size` stays the number of points. For
            class probabilities the log-likelihood in fits is `sum_c w_c q_c log p_c`.
        class_dim: the dimension of the classes in the net's output, such as 1 for images
            `(n, C, H, W)`; a BNN moves it to the end, and returns predictions `(n, H, W, C)`.

    Raises:
        TypeError: targets that are neither integers nor such probabilities.
        ValueError: a target outside `0 ... C - 1`; probabilities that are negative or do not sum to
            one; class weights that are negative, or all 0.

    Example:
        >>> import torch
        >>> likelihood = Categorical(dataset_size=100)
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 1.0]]])  # two draws, one point
        >>> likelihood.aggregate_predictions(logits).softmax(-1)
        tensor([[0.5749, 0.4251]])
    """

    has_order = False
    has_classes = is_zero_outside = True

    def __init__(
        self,
        dataset_size: float | None = None,
        logit_predictions: bool = True,
        event_dim: int = 0,
        name: str = "likelihood",
        *,
        ignore_index: int | None = None,
        class_weights: Tensor | None = None,
        class_dim: int = -1,
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.logit_predictions = logit_predictions
        self.ignore_index, self.class_dim = ignore_index, class_dim
        self.prepares_outputs, self.prepares_targets = class_dim != -1, class_weights is not None
        weights = None
        if class_weights is not None:
            weights = check.tensor("class_weights", class_weights).float()
            check.shape("class_weights", weights, ("C",))
            check.numbers("class_weights", weights, "a number from 0 each", least=0)
            check.number("the sum of class_weights", weights.sum(), above=0)
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weights, persistent=False)

    def known(self, targets: Targets) -> Targets:
        if targets.values.is_floating_point():  # probabilities, of which a missing one is a label
            return targets.masked_by_vectors()
        if targets.values.dtype != torch.long:  # bytes would index as a mask
            targets = replace(targets, values=targets.values.long())
        if self.ignore_index is None:
            return targets
        return targets.masked(targets.values != self.ignore_index)

    def with_fit_weights(self, targets: Tensor | Targets) -> Tensor | Targets:
        if self.class_weights is None:
            return targets
        given, labels = Targets.of(targets), self.observed(targets).values
        weights = self.class_weights.to(given.device)
        if labels.is_floating_point():
            if labels.shape[-1] != len(weights):
                return targets  # as below
            each = (labels * weights).sum(-1)  # is 0 where no class counts
            shares = (labels * weights / each.unsqueeze(-1)).where(each.unsqueeze(-1) > 0, labels)
            return replace(given, values=shares).weighted(each)
        if not 0 <= int(labels.min()) <= int(labels.max()) < len(weights):
            return targets  # the check of targets says what is wrong with them
        return given.weighted(weights[labels])

    def from_net(self, outputs: Any) -> Any:
        return outputs.movedim(self.class_dim, -1) if isinstance(outputs, Tensor) else outputs

    @staticmethod
    def expected_range(support: Any) -> str:
        # Before "but they range from".
        if isinstance(support, _Probabilities):
            return "expected probabilities of the classes, which sum to one"
        return f"{Likelihood.expected_range(support)} (the net's outputs, counted from 0)"

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        logits = predictions if self.logit_predictions else probs_to_logits(predictions)
        return LogitCategorical(logits).to_event(self.event_dim)

    def prepare_targets(self, predictions: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            return targets.long()
        if targets.shape != predictions.shape:
            raise TypeError(
                f"Categorical got targets of {targets.dtype}; pass targets.long(), or "
                f"probabilities of the classes, of the net's shape {tuple(predictions.shape)}"
            )
        return targets.to(predictions.dtype)

    def distribution_of(self, distribution: Any, targets: Tensor) -> Any:
        if not targets.is_floating_point():
            return distribution
        return dist.Independent(
            _SoftCategorical(without_events(distribution)), self.event_dim, validate_args=False
        )

    def class_logits(self, predictions: Tensor) -> Tensor:
        predictions = at_least_float32(predictions)
        return predictions if self.logit_predictions else _log(predictions)

    def from_class_logits(self, logits: Tensor) -> Tensor:
        return logits if self.logit_predictions else logits.softmax(-1)

    def check_predictions(self, predictions: Tensor) -> None:
        if predictions.dim() < self.event_dim + 1:
            raise ValueError(
                f"Categorical got predictions of shape {tuple(predictions.shape)}; expected (n, "
                f"..., C) with event_dim={self.event_dim} dimensions between points and classes: "
                "the net may sum or average over the batch"
            )
        # bfloat16 rounds probabilities by more than 1e-3.
        tolerance = max(TOLERANCE, torch.finfo(predictions.dtype).eps)
        sums = at_least_float32(predictions).sum(-1)
        distributions = bool((predictions >= 0).all() & ((sums - 1).abs() < tolerance).all())
        _check_kind(self.logit_predictions, distributions)

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        most = predictions.argmax(-1)
        if targets.is_floating_point():
            return 1 - targets.gather(-1, most[..., None])[..., 0]
        return (most != targets).to(predictions.dtype)

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Tensor:
        predictions = stacked(predictions, dim)
        if not self.logit_predictions:
            return mean_over(predictions, dim, weights)
        return log_mean_exp(predictions.log_softmax(-1), dim, weights)

    def mixture_log_likelihood(
        self, predictions: Tensor, targets: Tensor | Targets, latents: Latents = None
    ) -> Tensor:
        found = self._read(targets)
        if not _are_shares(found.values):
            return super().mixture_log_likelihood(predictions, found, latents)
        combined = self.aggregate_predictions(at_least_float32(predictions))
        return self.log_likelihood(combined, found)

    def _of_mixture(
        self, logs: Tensor, prediction: Tensor, targets: Targets, weights: Tensor | None
    ) -> Tensor:
        if _are_shares(targets.values):
            return self.log_likelihood(prediction, targets)
        return super()._of_mixture(logs, prediction, targets, weights)


def _are_shares(targets: Tensor) -> bool:
    """Whether targets are probabilities of classes, for one label of each point.

    Then a mixture is scored by its prediction: the mean over labels of the log of its probability.
    """
    return targets.is_floating_point() and targets[..., 0].numel() == len(targets)


class LogitCategorical(dist.Categorical):
    """A Categorical whose `log_prob` runs the two fused kernels of the cross-entropy.

    It also takes class probabilities `q` in the place of labels, with `sum_c q_c log p_c`.
    """

    def __init__(self, logits: Tensor) -> None:
        self._param = self.logits = logits.log_softmax(-1)
        self._num_events = logits.shape[-1]
        td.Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> dist.Categorical:
        if torch.Size(batch_shape) == self.batch_shape:
            return self
        return dist.Categorical(logits=self.logits, validate_args=False).expand(batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        if value.is_floating_point() and value.shape == self.logits.shape:
            return _SoftCategorical(self).log_prob(value)
        if value.shape != self.batch_shape or not value.dim():
            log_prob: Tensor = super().log_prob(value)
            return log_prob
        logits, labels = self.logits.flatten(0, -2), value.long().flatten()
        known = labels.clamp(0, self._num_events - 1)
        # A label of no class has density zero; `nll_loss` would end an accelerator's process.
        flat = nll_loss(logits, known, reduction="none").where(known == labels, math.inf)
        return -flat.reshape(value.shape)


class _Probabilities(constraints.Constraint):
    """Vectors of numbers from 0 that sum to one, as well as half precision knows."""

    event_dim = 1

    def check(self, value: Tensor) -> Tensor:
        return (value >= 0).all(-1) & ((value.sum(-1) - 1).abs() < TOLERANCE)


class _SoftCategorical(dist.TorchDistribution):
    """Probabilities of classes as targets, whose log-density is `sum_c q_c log p_c`."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = _Probabilities()

    def __init__(self, classes: Any) -> None:
        self._logits = classes.logits
        super().__init__(classes.batch_shape, self._logits.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return self

    def log_prob(self, value: Tensor) -> Tensor:
        # A class of probability 0 in both counts nothing.
        terms: Tensor = (value * self._logits).where(value > 0, 0.0)
        return terms.sum(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        classes = dist.Categorical(logits=self._logits, validate_args=False).sample(sample_shape)
        return one_hot(classes, self._logits.shape[-1]).to(self._logits)


class Bernoulli(Likelihood):
    """Binary labels; predictions are logits `(n, ...)`, one for each target.

    Aggregated predictions are logits of the mean probability (probabilities for
    `logit_predictions=False`). The other arguments are those of `Likelihood`.

    Args:
        logit_predictions: the net returns logits; probabilities for `False`.
        pos_weight: how much targets of 1 count in fits, as in `torch.nn.BCEWithLogitsLoss`: a
            number, or one for each number of a point. Evaluations do not use it, and `dataset_size`
            stays the number of points.

    Raises:
        ValueError: a target other than 0 and 1; weights that are negative or not finite.

    Example:
        >>> import torch
        >>> likelihood = Bernoulli(dataset_size=100)
        >>> likelihood.aggregate_predictions(torch.tensor([[2.0], [-1.0]])).sigmoid()
        tensor([0.5749])
    """

    has_classes = True

    def __init__(
        self,
        dataset_size: float | None = None,
        logit_predictions: bool = True,
        event_dim: int = 0,
        name: str = "likelihood",
        *,
        pos_weight: float | Tensor | None = None,
    ) -> None:
        super().__init__(dataset_size, event_dim, name)
        self.logit_predictions = logit_predictions
        self.prepares_targets = pos_weight is not None
        weight = None if pos_weight is None else check.tensor("pos_weight", pos_weight).float()
        if weight is not None:
            check.numbers("pos_weight", weight, "numbers of 0 or more", least=0)
        self.pos_weight: Tensor | None
        self.register_buffer("pos_weight", weight, persistent=False)

    def with_fit_weights(self, targets: Tensor | Targets) -> Tensor | Targets:
        if self.pos_weight is None:
            return targets
        given = Targets.of(targets)
        # A weight of 0 leaves out no point, since all count for `dataset_size`.
        weight = self.pos_weight.to(given.device)
        weight = weight.clamp_min(torch.finfo(weight.dtype).tiny)
        each = weight.where(given.values > 0.5, weight.new_ones(()))
        return given.masked(each)

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        given = {"logits" if self.logit_predictions else "probs": predictions}
        return dist.Bernoulli(**given, validate_args=False).to_event(self.event_dim)

    def check_predictions(self, predictions: Tensor) -> None:
        """Raise if a probability is outside [0, 1]; any number may be a logit."""
        if not self.logit_predictions:
            _check_kind(False, bool(((predictions >= 0) & (predictions <= 1)).all()))

    def point_error(self, predictions: Tensor, targets: Tensor) -> Tensor:
        threshold = 0.0 if self.logit_predictions else 0.5
        return ((predictions > threshold) != (targets > 0.5)).to(predictions.dtype)

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Tensor:
        predictions = stacked(predictions, dim)
        if not self.logit_predictions:
            return mean_over(predictions, dim, weights)
        # The difference of two log-mean-exps stays finite where the mean rounds to 0 or 1.
        one, zero = logsigmoid(predictions), logsigmoid(-predictions)
        return log_mean_exp(one, dim, weights) - log_mean_exp(zero, dim, weights)

    def class_logits(self, predictions: Tensor) -> Tensor:
        predictions = at_least_float32(predictions)
        if self.logit_predictions:
            return torch.stack([torch.zeros_like(predictions), predictions], -1)
        return _log(torch.stack([1 - predictions, predictions], -1))

    def from_class_logits(self, logits: Tensor) -> Tensor:
        found = logits[..., 1] - logits[..., 0]
        return found if self.logit_predictions else found.sigmoid()


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _check_kind(expects_logits: bool, are_probabilities: bool) -> None:
    if not expects_logits and not are_probabilities:
        raise ValueError(
            "the output is not probabilities; it looks like logits: use logit_predictions=True"
        )
    if expects_logits and are_probabilities:
        warn(
            "the net's output looks like probabilities, but is taken for logits: drop the net's "
            "softmax, or use logit_predictions=False",
        )
