"""Abstaining, so that the share of errors among the answers stays below a limit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.calibration.base import Calibrator, check_classes, check_logits
from tyxe.data import Targets
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood

# Confidences that are tried, as log-odds, which do not depend on data.
STRICTEST, STEPS = 30.0, 1000


class RiskControl(Calibrator):
    """Answers for the most confident points, as many as keep the share of errors below a risk.

    With probability `1 - delta` over the held-out points, the share of errors among all points that
    are answered is at most `risk`. This holds for any classifier, and for points that are
    independent and like those held out. It assumes that errors among answers do not become rarer
    when a lower threshold answers more.

    Thresholds of the largest probability's log-odds are tested from the strictest down, by the
    Clopper-Pearson bound of the error, until the first fails. The first one answers a fifth of the
    points, or, if more, as many as the bound needs.

    Args:
        risk: the largest share of errors, between 0 and 1.
        delta: the probability that it is exceeded.

    Attributes:
        threshold: the smallest log-odds that are answered; infinity, with a warning, if nothing is
            answered; None before `fit`.

    Raises:
        TypeError: predictions that are not logits `(n, C)`.
        ValueError: from `fit`, fewer points than `log(delta) / log(1 - risk)`, weights other than
            1, or targets that are not classes.

    References:
        Angelopoulos et al. 2021, Learn then test, fixed-sequence testing; Geifman and El-Yaniv
        2017, Selective classification for deep neural networks.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.2, 0.0]]).repeat(100, 1)
        >>> y = torch.tensor([0, 1, 1]).repeat(100)
        >>> control = RiskControl(risk=0.05, delta=0.1).fit(logits, y)
        >>> control(torch.tensor([[5.0, 0.0], [0.1, 0.0]]))
        tensor([ True, False])
    """

    replaces = False

    def __init__(self, risk: float = 0.01, delta: float = 0.1) -> None:
        self.risk = check.number("risk", risk, above=0, below=1, hint=": risk=0.01 for 1 %")
        self.delta = check.number("delta", delta, above=0, below=1)
        self.threshold: float | None = None

    def of(self, predictions: Any, likelihood: Likelihood) -> Tensor:
        return likelihood.class_logits(predictions)

    def fit(self, predictions: Any, y: Tensor | Targets) -> RiskControl:
        logits, y, counts = check_classes(predictions, y)
        expected = "1, for which the guarantee is: leave weights out"
        check.numbers("how often a point counts", counts, expected, least=1, most=1)
        needed = math.ceil(math.log(self.delta) / math.log1p(-self.risk))
        hint = (
            f" for a risk of {self.risk:g} with delta={self.delta:g}: take more, or a larger risk "
            "or delta"
        )
        check.count("the number of held-out points", len(logits), needed, hint)
        odds, order = _log_odds(logits).sort(descending=True)
        errors = (logits.argmax(-1) != y)[order].cumsum(0).tolist()
        # The least odds are those of equal classes.
        least = -math.log(logits.shape[-1] - 1)
        ends = torch.linspace(STRICTEST, least, STEPS, dtype=odds.dtype, device=odds.device)
        ends[-1] = -math.inf
        tried = ends.tolist()
        answered = torch.searchsorted(-odds, -ends, right=True).tolist()
        self.threshold = math.inf
        for threshold, count in zip(tried, answered, strict=True):
            if count < max(needed, len(odds) // 5):
                continue
            if _binomial_tail(errors[count - 1], count, self.risk) > self.delta:
                break
            self.threshold = threshold
        if self.threshold == math.inf:
            warn(
                f"nothing is answered: already among the most confident points the error may be "
                f"above the risk of {self.risk:g}; take a larger risk, more points, or a better net"
            )
        return self

    def predict(self, predictions: Any) -> Tensor:
        """Return booleans, True for points to answer, `(n, ...)`."""
        threshold = self._fitted("threshold")
        return (_log_odds(check_logits(predictions)) >= threshold).reshape(predictions.shape[:-1])


def _log_odds(logits: Tensor) -> Tensor:
    """Return the log-odds of the most probable class, which do not round to those of certainty."""
    top, place = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, place, -math.inf).logsumexp(-1)
    return top[:, 0] - others


def _binomial_tail(errors: int, count: int, risk: float) -> float:
    """Return the probability of so many errors or fewer; 1 from their expectation on.

    It is at most `delta` where the Clopper-Pearson bound of the error is at most the risk.
    """
    if errors >= count * risk:
        return 1.0
    e = torch.arange(errors + 1, dtype=torch.float64, device="cpu")
    choices = math.lgamma(count + 1) - (e + 1).lgamma() - (count - e + 1).lgamma()
    logs = choices + e * math.log(risk) + (count - e) * math.log1p(-risk)
    return float(logs.logsumexp(0).exp())
