"""What a BNN remembers while it is used."""

from __future__ import annotations

from typing import Any

from tyxe.bnn.standin import Outline
from tyxe.curvature.linearize import Linearized


class Runtime:
    """What a BNN remembers while it is used, which is not copied, pickled or saved with it.

    Attributes:
        fitted_by: the thread that fits it, or None.
        prior_is_fixed: whether its prior must not change.
        outline: of its net.
        norms: a loader for statistics of norms at each draw, and these norms.
        keeps_prefix: whether what no site reaches is kept over draws.
        compared: kinds of batches for which that was compared with passes of the whole net.
        met: sites that were looked for in a forward.
        read: those of them whose gradients were looked for as well.
        linearized: what is known of the net's gradients for each point.
        prior_version: how often the prior has been replaced.
        steps: the compiled steps of the last fit.
    """

    def __init__(self) -> None:
        self.fitted_by: int | None = None
        self.prior_is_fixed = False
        self.outline: Outline | None = None
        self.norms: tuple[Any, list[Any]] | None = None
        self.keeps_prefix = True
        self.compared: set[Any] = set()
        self.met: set[str] = set()
        self.read: set[str] = set()
        self.linearized = Linearized()
        self.prior_version = 0
        self.steps: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return Runtime()

    def __reduce__(self) -> tuple[type[Runtime], tuple[()]]:
        return Runtime, ()
