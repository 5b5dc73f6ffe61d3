"""Errors of targets that do not fit: of another shape, outside of the support, or too many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tyxe import check
from tyxe.data import Targets
from tyxe.util import elementwise


def dataset_size(kind: str, size: Any) -> float | None:
    """Return the number of points, whole or not; None for -1, not known yet."""
    if size is None:
        return None
    hint = f", the number of training points or the sum of their weights: {kind}(len(dataset))"
    found = check.number("dataset_size", size, hint=hint)
    if found == -1:
        return None
    check.number("dataset_size", found, above=0, hint=hint)
    return int(found) if found.is_integer() else found


def within_size(likelihood: Any, targets: Tensor | Targets) -> tuple[Targets, Tensor | None]:
    """Return what `Likelihood.counted` does, or raise for more than `dataset_size`."""
    values = Targets.of(targets).values
    if values.is_complex():
        raise TypeError(f"targets are of {values.dtype}; pass targets.real, or view_as_real")
    found, rows = likelihood.counted(targets)
    count = float(likelihood.count(found))
    if count > likelihood.dataset_size * (1 + 1e-6):
        raise ValueError(
            f"the batch has {count:g} points, but the likelihood was built with "
            f"dataset_size={likelihood.dataset_size}; pass the number of training points"
            + (", the sum of their weights" if found.weights is not None else "")
        )
    return found, rows


def check_batch(likelihood: Any, predictions: Tensor, targets: Tensor | Targets) -> None:
    """Check that the targets of a batch fit, and are not more than the data set has.

    Points that do not count are not checked: their labels may be -1 or NaN. If the net's output is
    not finite, targets are not checked; other code reports that.
    """
    found, rows = within_size(likelihood, targets)
    if rows is not None:
        predictions = predictions[rows.to(predictions.device)]
    if len(found) and bool(predictions.isfinite().all()):
        likelihood.check_targets(predictions, found)


def within_support(likelihood: Any, support: Any, prepared: Tensor, targets: Tensor) -> None:
    """Raise unless prepared targets lie in a support; the message has them as they came."""
    # Infinity is a real number for a support, and has no finite log-likelihood.
    ok = support.check(prepared).all() & (likelihood.takes_infinity | prepared.isfinite()).all()
    if not bool(ok):
        raise ValueError(
            f"targets lie outside the support of {type(likelihood).__name__}: "
            f"{likelihood.expected_range(elementwise(support))}, but they range from "
            f"{targets.min().item()} to {targets.max().item()}"
        )


def shape_message(
    likelihood: Any, expected: torch.Size, given: torch.Size, predictions: torch.Size
) -> str:
    """Say that targets have another shape than expected, and what may fix it."""
    more = len(given) - len(expected)
    if more == 1 and given == predictions and given[-1] > 1:
        hint = "pass classes as integers: targets.argmax(-1)"
    elif more == -1 and expected[-1] == 1:
        hint = "pass targets.unsqueeze(-1), or squeeze the net's output"
    elif more == 1 and given[-1] == 1:
        hint = "pass targets.squeeze(-1), or unsqueeze the net's output"
    elif given == predictions[:1] + predictions[2:]:
        hint = "classes belong in the last dimension: return logits.movedim(1, -1)"
    else:
        hint = likelihood.shape_hint
    return (
        f"{type(likelihood).__name__} got targets of shape {tuple(given)} and expected "
        f"{tuple(expected)}, by its predictions; {hint}"
    )
