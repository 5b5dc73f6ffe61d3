"""One number for all predictions: a temperature for classes, a factor for standard deviations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.calibration.base import Calibrator, check_classes, check_numbers, check_pair
from tyxe.data import Targets
from tyxe.likelihoods import Likelihood
from tyxe.metrics.checks import average, check_scale

# A temperature is looked for between 1e-9 and 1e9, by so many bisections.
BOUND, STEPS = 1e9, 60


class TemperatureScaling(Calibrator):
    """Logits divided by the temperature with the best log-likelihood of held-out data.

    For a BNN, the logits are those of its averaged predictions, as `predict` returns them. Targets
    are labels or class probabilities.

    Attributes:
        temperature: above 1, the predictions were too certain; None before `fit`.

    Raises:
        TypeError: predictions that are not logits `(n, C)`.
        ValueError: from `fit`, targets that are not such classes, or without a best temperature,
            because the predictions are all right, or not better than chance.

    Reference:
        Guo et al. 2017.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [0.0, 4.0], [4.0, 0.0]])
        >>> scaling = TemperatureScaling().fit(logits, torch.tensor([0, 1, 1]))
        >>> scaling(logits).softmax(-1)[0]
        tensor([0.6667, 0.3333])
    """

    def __init__(self) -> None:
        self.temperature: float | None = None

    def of(self, predictions: Any, likelihood: Likelihood) -> Tensor:
        return likelihood.class_logits(predictions)

    def back(self, found: Tensor, likelihood: Likelihood) -> Tensor:
        return likelihood.from_class_logits(found)

    def fit(self, predictions: Any, y: Tensor | Targets) -> TemperatureScaling:
        logits, y, counts = check_classes(predictions, y, soft=True)
        if bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all()):
            raise ValueError("predictions are probabilities; pass logits, or probs.log()")
        # A class that the net masks, by -inf, has a product of 0 with its probability.
        logits = logits.detach().clamp_min(torch.finfo(logits.dtype).min)
        shares = counts / counts.sum()
        is_soft = y.is_floating_point()
        at_each = (logits * y).sum(1) if is_soft else logits.gather(1, y[:, None])[:, 0]
        at_targets = at_each @ shares

        def slope(inverse: float) -> float:
            # The loss is convex in the inverse temperature, so that its slope grows.
            expected = ((inverse * logits).softmax(-1) * logits).sum(-1) @ shares
            return float(expected - at_targets)

        low, high = 1 / BOUND, BOUND
        if slope(high) <= 0 or slope(low) >= 0:
            what = "all right" if slope(high) <= 0 else "no better than by chance"
            raise ValueError(
                f"no temperature is the best: the predictions of {float(counts.sum()):g} held-out "
                f"points are {what}; take more points, or others than those that the net was "
                "trained on"
            )
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
        self.temperature = 1 / middle
        return self

    def predict(self, predictions: Any) -> Tensor:
        return torch.as_tensor(predictions) / self._fitted("temperature")


class ScaleFactor(Calibrator):
    """Standard deviations times the factor with the best Gaussian log-likelihood of held-out data.

    It is `sqrt(mean ((y - mu) / sigma)^2)`. Predictions are `(mean, scale)`, of BNNs
    with other forms of predictions as well.

    Attributes:
        factor: above 1, the predictions were too certain; None before `fit`.

    Raises:
        TypeError: predictions that are not such a pair.
        ValueError: from `fit`, targets of another shape, or standard deviations of 0.

    Example:
        >>> mean, scale, y = torch.zeros(2), torch.ones(2), torch.tensor([2.0, -2.0])
        >>> ScaleFactor().fit((mean, scale), y)((mean, scale))
        (tensor([0., 0.]), tensor([2., 2.]))
    """

    def __init__(self) -> None:
        self.factor: float | None = None

    def of(self, predictions: Any, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
        return likelihood.mean_and_scale(predictions)

    def fit(self, predictions: Any, y: Tensor | Targets) -> ScaleFactor:
        mean, scale, targets, counts = check_numbers(predictions, y)
        z = (targets - mean) / check_scale(scale, mean)
        factor = average(z.square(), None, counts).sqrt()
        hint = ": the predictions are the targets themselves, so take held-out data"
        self.factor = check.number("the factor", factor, above=0, hint=hint)
        return self

    def predict(self, predictions: Any) -> tuple[Tensor, Tensor]:
        factor = self._fitted("factor")
        check_pair(predictions)
        return predictions[0], predictions[1] * factor
