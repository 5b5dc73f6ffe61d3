"""What is fitted to predictions of held-out data, and changes others."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tyxe import files
from tyxe.bnn.batches import batches_of
from tyxe.bnn.scoring import rows_of
from tyxe.data import Unpack, concatenate_targets
from tyxe.errors import described
from tyxe.metrics.checks import check_real, check_regression, check_targets


class Calibrator(ABC):
    """Base of calibrators: `fit` to predictions with targets, then `predict` others.

    A subclass implements `fit`, which returns itself, and `predict`; what it fits is in attributes.
    """

    @abstractmethod
    def fit(self, predictions: Any, y: Tensor) -> Any:
        """Fit to predictions of data that the net was not trained on, and return itself."""

    @abstractmethod
    def predict(self, predictions: Any) -> Any:
        """Return what follows from predictions; a RuntimeError before `fit`."""

    def __call__(self, predictions: Any) -> Any:
        return self.predict(predictions)

    def of(self, predictions: Any) -> Any:
        """Return what `fit` and `predict` take from what a BNN's `predict` returns."""
        return predictions

    def wrap(
        self, bnn: Any, loader: Iterable[Any], *, unpack: Unpack | None = None, **options: Any
    ) -> Calibrated:
        """Fit to a BNN's predictions of held-out data, and return what predicts by both.

        Args:
            bnn: any BNN with a likelihood, or an `EnsembleBNN`.
            loader: yields held-out `(inputs, targets)`; what the likelihood ignores is left out.
            unpack: from what the loader yields to these.
            options: of `predict`, such as `num_predictions=32`; the same in all predictions.

        Raises:
            TypeError: no BNN, one of several outputs, or one whose predictions the calibrator is
                not for.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(50), tyxe.guides.AutoNormal)
            >>> held_out = [(torch.randn(50, 2), torch.arange(50) % 3)]
            >>> sets = tyxe.calibration.SplitConformal(level=0.8).wrap(bnn, held_out)
            >>> sets.predict(torch.zeros(5, 2)).shape
            torch.Size([5, 3])
        """
        if not hasattr(bnn, "to_evaluate"):
            raise TypeError(
                f"wrap takes a BNN, and got {described(bnn)}: for a plain net call "
                "fit(predictions, y), or wrap a VariationalBNN with a prior that hides all"
            )
        batches = list(batches_of(bnn.to_evaluate(list(loader), unpack)))
        found = bnn.predict(batches, **options)
        if isinstance(found, Mapping):
            raise TypeError("the BNN has several outputs: calibrate the predictions of each apart")
        targets = concatenate_targets([targets for _, targets in batches])
        kept, rows = bnn.likelihood.that_count(targets)
        is_pair = isinstance(found, tuple)
        parts = tuple(rows_of(part, rows, 0) for part in (found if is_pair else (found,)))
        self.fit(self.of(parts if is_pair else parts[0]), kept.values)
        return Calibrated(bnn, self, options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was fitted to a file; an OSError leaves an earlier one."""
        files.write(path, {"calibrator": type(self).__name__, "state": dict(self.__dict__)})

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Read what `save` has written, and return itself.

        Raises:
            ValueError: a damaged file, or one of another calibrator; nothing is changed.
        """
        saved = files.read(path)
        name = saved.get("calibrator") if isinstance(saved, dict) else None
        if name != type(self).__name__:
            raise ValueError(f"{path} is of a {name}; expected a {type(self).__name__}")
        self.__dict__.update(saved["state"])
        return self

    def _fitted(self, name: str) -> Any:
        found = getattr(self, name)
        if found is None:
            raise RuntimeError(f"this {type(self).__name__} is not fitted: call fit, or load")
        return found


class Calibrated:
    """A BNN whose predictions go through a calibrator, as `Calibrator.wrap` makes it.

    Attributes:
        bnn: the BNN.
        calibrator: what was fitted.
    """

    def __init__(self, bnn: Any, calibrator: Calibrator, options: Mapping[str, Any]) -> None:
        self.bnn, self.calibrator, self._options = bnn, calibrator, dict(options)

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Return calibrated predictions, sets or intervals; arguments are those of the BNN's."""
        found = self.bnn.predict(*inputs, **(self._options | options))
        return self.calibrator.predict(self.calibrator.of(found))


def check_logits(values: Any) -> Tensor:
    """Return logits or probabilities `(..., C)` as rows `(n, C)` in float64, or raise."""
    if not isinstance(values, Tensor) or values.dim() < 2:
        raise TypeError(
            f"predictions are {described(values)}; expected a tensor (n, C), a row of classes each"
        )
    return check_real("predictions", values).reshape(-1, values.shape[-1]).double()


def check_classes(values: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return logits or probabilities as `check_logits` does, and their targets `(n,)`, or raise."""
    rows = check_logits(values)
    return rows, check_targets(torch.as_tensor(y).reshape(-1).to(rows.device), rows)


def check_pair(values: Any, y: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return a pair of predictions `(n, ...)` and targets in float64, or raise.

    Without targets, the first of the pair stands for them.
    """
    if not isinstance(values, tuple | list) or len(values) != 2:
        raise TypeError(
            f"predictions are {described(values)}; expected a pair of tensors, such as mean and "
            "standard deviation of numbers (classes have sets, and no intervals)"
        )
    first, second = (torch.as_tensor(part) for part in values)
    first, targets = check_regression(first, first if y is None else torch.as_tensor(y))
    second = check_real("predictions[1]", second.expand_as(first))
    return first.double(), second.double(), targets.double()
