"""Sets and intervals with guaranteed coverage: split conformal prediction, CV+ and jackknife+."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.calibration.base import (
    Calibrator,
    check_classes,
    check_logits,
    check_numbers,
    check_pair,
)
from tyxe.data import Targets
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.metrics.checks import check_probs, check_scale

CLASS_SCORES, NUMBER_SCORES = ("lac", "aps"), ("normalized", "cqr")
# Version of the scores behind the threshold in a file; the first had none.
VERSION = 2


class SplitConformal(Calibrator):
    """Sets or intervals that hold the target with a given probability, for any predictions.

    For `n` held-out points and a new one that are exchangeable, the probability is between `level`
    and `level + 1 / (n + 1)`, or above where scores are equal, on average over such points, and not
    for each kind of input. Better predictions give smaller sets.

    Args:
        score: for classes, from probabilities `(n, C)`: `"aps"`, the probability of all classes
            that are more likely (the default), or `"lac"`, one minus that of the class, whose sets
            are the smallest on average, and may be empty; for numbers: `"normalized"`,
            `|y - mu| / sigma`, from `(mean, scale)` (the default for pairs), or `"cqr"`, from two
            quantiles `(lower, upper)`, for a BNN those of a Normal. For several numbers `(n, ...)`
            the intervals hold all at once.
        level: the probability, between 0 and 1.
        randomized: in `"aps"`, count a random part of the class itself too, as in the paper, by
            torch's generator, also in an exported module: no scores are equal, and sets differ from
            call to call and may be empty. By default none of it counts, so sets are the same each
            time and hold the most likely class.

    Attributes:
        threshold: the largest score inside a set; None before `fit`.

    Raises:
        TypeError: predictions that the score does not take.
        ValueError: an unknown score or level; from `fit`, fewer points than the level needs, or
            targets that are not classes.

    References:
        Vovk et al. 2005; Sadinle et al. 2019 (LAC); Romano et al. 2020 (APS) and 2019 (CQR).

    Example:
        >>> probs = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.5, 0.1]]).repeat(10, 1)
        >>> conformal = SplitConformal("lac", level=0.9).fit(probs, torch.tensor([0, 1]).repeat(10))
        >>> conformal.predict(torch.tensor([[0.5, 0.5, 0.0]]))
        tensor([[ True,  True, False]])
    """

    replaces = False

    def __init__(
        self, score: str | None = None, level: float = 0.9, randomized: bool = False
    ) -> None:
        if score is not None:
            check.choice("score", score, (*CLASS_SCORES, *NUMBER_SCORES))
        self.score, self.randomized = score, randomized
        self.level = check.number("level", level, above=0, below=1, hint=": level=0.9 for 90 %")
        self.threshold: float | None = None

    def of(self, predictions: Any, likelihood: Likelihood) -> Any:
        if likelihood.has_classes and self.score not in NUMBER_SCORES:
            return likelihood.class_logits(predictions).softmax(-1)
        # The coverage is the same for any scale, also of an inferred count.
        mean, scale = likelihood.mean_and_scale(predictions, likelihood.prior_means())
        if self.score != "cqr":
            return mean, scale
        far = scale * NormalDist().inv_cdf((1 + self.level) / 2)
        return mean - far, mean + far

    def fit(self, predictions: Any, y: Tensor | Targets) -> SplitConformal:
        kind = self.score or ("aps" if isinstance(predictions, Tensor) else "normalized")
        if kind in CLASS_SCORES:
            probs, y, counts = check_classes(predictions, y)
            scores = self._of_classes(kind, probs).gather(1, y[:, None])[:, 0]
        else:
            each, within = _of_numbers(kind, predictions, y)
            # Numbers that do not count are held by every interval.
            each = each.where(within > 0, -math.inf)
            scores = each.reshape(len(each), -1).amax(1)
            counts = within.reshape(len(each), -1).amax(1)
        total, least = float(counts.sum()), 0.0
        rank = (total + 1) * self.level - 1e-9  # a product such as 10 * 0.7 is rounded
        scores, order = scores.sort()
        place = int(torch.searchsorted(counts[order].cumsum(0), rank))
        if place == len(scores):  # too few, also where it is by rounding of weights
            least = max(math.ceil(self.level / (1 - self.level) - 1e-9), total + 1)
        hint = f" for a level of {self.level:g}: take more, or a lower level"
        check.number("the number of held-out points", total, least=least, hint=hint)
        self.score, self.threshold = kind, float(scores[place])
        return self

    def predict(self, predictions: Any) -> Any:
        """Return sets `(n, C)` of booleans, or `(lower, upper)`, which may cross with `"cqr"`."""
        threshold = self._fitted("threshold")
        if self.score in CLASS_SCORES:
            held = self._of_classes(self.score, check_logits(predictions)) <= threshold
            return held.reshape(predictions.shape)
        return _ends(str(self.score), predictions, threshold)

    def _content(self) -> dict[str, Any]:
        return {**super()._content(), "version": VERSION}

    def _state_in(self, saved: Any, path: Any) -> dict[str, Any]:
        state = super()._state_in(saved, path)
        is_old = "version" not in saved and state["threshold"] is not None
        if is_old and state["score"] == "aps" and not state["randomized"]:
            warn(
                f"{path} is of an earlier version, in which randomized=False counted all of a "
                "class's own probability; by its threshold sets are too large now: fit again"
            )
        return state

    def _of_classes(self, kind: str, probs: Tensor) -> Tensor:
        """Return the scores of all classes, `(n, C)`."""
        probs = check_probs(probs)
        if kind == "lac":
            return 1 - probs
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        scores = ordered.cumsum(-1) - ordered
        if self.randomized:
            scores = scores + torch.rand(len(probs), 1, device=probs.device).to(probs) * ordered
        return torch.empty_like(probs).scatter(-1, order, scores)


def _ends(kind: str, predictions: Any, threshold: Any) -> tuple[Tensor, Tensor]:
    """Return the ends of intervals for a threshold, or for one of each number."""
    first, second = check_pair(predictions)
    middle, far = (second, threshold) if kind == "cqr" else (first, threshold * second)
    dtype = torch.result_type(*map(torch.as_tensor, predictions))
    return (first - far).to(dtype), (middle + far).to(dtype)


def _of_numbers(kind: str, predictions: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Return the least thresholds whose intervals hold the targets, as their ends are rounded.

    Beside them is how often each counts.
    """
    first, second, y, counts = check_numbers(predictions, targets)
    if kind == "cqr":
        scores = torch.maximum(first - y, y - second)
    else:
        scores = (y - first).abs() / check_scale(second, first)
    for exponent in range(-52, 1):
        lower, upper = _ends(kind, predictions, scores)
        missed = (y < lower) | (y > upper)
        if not bool(missed.any()):
            break
        scores = scores.where(~missed, scores + 2.0**exponent * scores.abs())
    return scores, counts


@check.arguments
def coverage(predicted: Any, y: Tensor) -> float:
    """Return the share of points whose targets lie in sets `(n, C)`, or in `(lower, upper)`.

    Numbers that are NaN are missing.

    Example:
        >>> coverage(torch.tensor([[True, False], [True, True]]), torch.tensor([1, 1]))
        0.5
    """
    if isinstance(predicted, Tensor):
        check.shape("predicted", predicted, (*y.shape, "C"), ": sets of classes, as y are labels")
        labels = y if y.is_floating_point() else y.long()  # floats are refused
        held = predicted.gather(-1, labels.to(predicted.device).unsqueeze(-1))
    else:
        lower, upper = _interval(predicted)
        y = y.to(lower.device)
        known = ~y.isnan().reshape(len(y), -1)
        held = ((lower <= y) & (y <= upper)).reshape(len(y), -1)
        held = (held | ~known).all(1)[known.any(1)]
    return float(held.double().mean())


@check.arguments
def size(predicted: Any) -> float:
    """Return the mean number of classes in sets `(n, C)`, or the mean width of `(lower, upper)`.

    Example:
        >>> size((torch.zeros(2), torch.tensor([1.0, 3.0])))
        2.0
    """
    if isinstance(predicted, Tensor):
        return float(predicted.double().sum(-1).mean())
    lower, upper = _interval(predicted)
    return float((upper - lower).double().clamp_min(0).mean())


def _interval(predicted: Any) -> Any:
    check.one_of("predicted", predicted, tuple | list, "a tensor of sets, or (lower, upper)")
    check.choice("the length of predicted", len(predicted), [2])
    return predicted


# From inputs to means, or means and scales, of targets.
Predictor = Callable[[Tensor], Any]


class CVPlus:
    """Intervals that hold a number with a given probability, by cross-validation.

    One model is trained without each fold of the data, and its errors on that fold widen its
    predictions. For exchangeable points the interval holds a target with a probability of at least
    `1 - 2 (1 - level)`, and about `level` in practice; with one fold for each point this is the
    jackknife+. With `K` folds of `n` points the bound is lower by at most `sqrt(2 / n)`.

    Args:
        train: called as `train(x, y)`, returns a function from inputs to means, or to
            `(mean, scale)`, such as `bnn.predict` of a fitted BNN. Errors are in units of the
            scales.
        level: the probability, between 0 and 1, for each number of a target separately.
        folds: number of models; None for one for each point.

    Raises:
        ValueError: from `fit`, fewer points than folds, or than the level needs.
        RuntimeError: `predict` before `fit`.

    Reference:
        Barber et al. 2021, Predictive inference with the jackknife+, eq. 7 and theorems 1 and 4.

    Example:
        >>> def train(x, y):
        ...     weights = torch.linalg.lstsq(x, y).solution
        ...     return lambda x: x @ weights
        >>> x = torch.randn(30, 2)
        >>> y = x.sum(1, keepdim=True) + 0.1 * torch.randn(30, 1)
        >>> lower, upper = CVPlus(train, level=0.9, folds=None).fit(x, y).predict(x)
        >>> bool((lower < upper).all())
        True
    """

    def __init__(
        self,
        train: Callable[[Tensor, Tensor], Predictor],
        level: float = 0.9,
        folds: int | None = 10,
    ) -> None:
        self.train = train
        self.level = check.number("level", level, above=0, below=1, hint=": level=0.9 for 90 %")
        self.folds = None if folds is None else check.count("folds", folds, 2)
        self._models: list[Predictor] = []

    @check.arguments
    def fit(self, x: Tensor, y: Tensor) -> CVPlus:
        """Train without each of the folds, which are drawn by torch's generator; return itself."""
        n = len(y)
        needed = max(self.folds or 2, math.ceil(self.level / (1 - self.level) - 1e-9))
        hint = (
            f" for level={self.level:g} and folds={self.folds}: take more points, fewer folds, or "
            "a lower level"
        )
        check.count("the number of points", n, needed, hint)
        check.shape("x", x, (n, *x.shape[1:]), ", a row for each target")
        check.numbers("y", y, "numbers, none of which is missing: fit(x[kept], y[kept])")
        folds = self.folds or n
        fold_of = torch.randperm(n, device="cpu") % folds
        models, errors = [], torch.empty(y.shape, dtype=torch.float64, device=y.device)
        for fold in range(folds):
            held = fold_of == fold
            model = self.train(x[~held], y[~held])
            mean, scale, targets, _ = check_numbers(_pair(model(x[held])), y[held])
            errors[held] = ((targets - mean).abs() / check_scale(scale, mean)).to(y.device)
            models.append(model)
        self._models, self._fold_of, self._errors = models, fold_of, errors
        return self

    @check.arguments
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of intervals, `(m, ...)` each."""
        models = check.known(self._models or None, "this CVPlus is not fitted: call fit(x, y)")
        pairs = [check_pair(_pair(model(x))) for model in models]
        mean, scale = (torch.stack(part)[self._fold_of] for part in zip(*pairs, strict=True))
        far = self._errors.to(scale.device).unsqueeze(1) * scale
        n = len(far)
        rank = math.ceil((n + 1) * self.level - 1e-9)  # a product such as 10 * 0.7 is rounded
        upper = (mean + far).kthvalue(rank, 0).values
        return (mean - far).kthvalue(n + 1 - rank, 0).values, upper


def _pair(found: Any) -> Any:
    return (found, torch.ones_like(found)) if isinstance(found, Tensor) else found
