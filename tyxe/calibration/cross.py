"""Jackknife+ and CV+: intervals for small data; all points serve for training and calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.calibration.base import check_numbers, check_pair
from tyxe.metrics.checks import check_scale

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
