"""Options of a Laplace approximation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, SupportsFloat

from tyxe import check
from tyxe.laplace.precision import ACCUMULATE


def check_settings(temperature: float, curvature_weight: float, accumulate: str) -> None:
    """Raise unless temperature and weight are positive numbers, and `accumulate` is known."""
    for name, number in (("temperature", temperature), ("curvature_weight", curvature_weight)):
        if not isinstance(number, SupportsFloat) or isinstance(number, bool):
            raise TypeError(f"{name} is {number!r}; expected a positive number")
        if not 0 < float(number) < math.inf:
            raise ValueError(f"{name} is {number}; expected a positive number")
    check.choice("accumulate", accumulate, ACCUMULATE)


@dataclasses.dataclass(frozen=True)
class LaplaceOptions:
    """Options of a `LaplaceBNN` besides the model; each is an attribute of the BNN as well.

    Attributes:
        num_passes: number of passes of `fit_curvature` through its loader, for augmented data.
        damping: spread the prior's precision over both Kronecker factors [T 3.41].
        curvature_weight: `lambda` of online Laplace, which multiplies the curvature in the
            posterior and not in the fit [T 3.56]; above 1 earlier tasks are forgotten less.
        accumulate: how the prior's precision and a new curvature are combined: `"sum"`, which for
            `"kron"` keeps a product for each task [T 3.59]; `"average"`, one product of averaged
            factors [T 3.60]; or `"per_task"`, a penalty for each task about its own mode [T 3.71].
        reduce: for `"kron"`, sum over positions that share weights before the product; otherwise
            each position counts as a data point.

    Raises:
        TypeError: an option of another type.
        ValueError: a number that is not positive; an unknown `accumulate`.

    Example:
        >>> LaplaceOptions(accumulate="average", curvature_weight=3.0).num_passes
        1
    """

    num_passes: int = 1
    damping: bool = False
    curvature_weight: float = 1.0
    accumulate: str = "sum"
    reduce: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_passes", check.count("num_passes", self.num_passes))
        for name in ("damping", "reduce"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; expected True or False")
        check_settings(1.0, self.curvature_weight, self.accumulate)

    def of_state(self) -> dict[str, Any]:
        """Return the options that are attributes of a `LaplaceState`, by name."""
        return {name: getattr(self, name) for name in ("damping", "curvature_weight", "accumulate")}
