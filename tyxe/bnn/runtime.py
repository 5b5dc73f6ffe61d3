"""What a BNN remembers while it is used, and how one thread has it for a fit."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from tyxe.bnn.standin import Outline, in_modes
from tyxe.curvature.linearize import Linearized
from tyxe.predictive.forwards import OnePass
from tyxe.threads import as_before, exclusive
from tyxe.util import outside_inference


@dataclasses.dataclass(eq=False)
class Runtime:
    """What a BNN remembers while it is used, which is not copied, pickled or saved with it."""

    # The thread that fits it, and whether its prior must not change.
    fitted_by: int | None = None
    prior_is_fixed: bool = False
    # Of its net.
    outline: Outline | None = None
    # From what loaders yield to inputs and targets, as the last fit was given it.
    unpack: Any = None
    # A loader for statistics of norms at each draw, and these norms.
    norms: tuple[Any, list[Any]] | None = None
    # Whether what no site reaches is kept over draws, and the kinds of batches for which that was
    # compared with passes of the whole net.
    keeps_prefix: bool = True
    compared: set[Any] = field(default_factory=set)
    # Passes at many draws at once, and how many of these there may be at a time for memory.
    one_pass: OnePass = field(default_factory=OnePass)
    most_at_once: int = 2**62
    # Sites that were looked for in a forward, and those of which gradients were looked for as well.
    met: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    # What is known of the net's gradients for each point.
    linearized: Linearized = field(default_factory=Linearized)
    # The weight of the KL in the last epoch of a fit.
    beta: float = 1.0
    # Whether a fit has looked at the scale of inputs.
    has_met_inputs: bool = False
    # The compiled steps of the last fit, and the programs of predictions with the net they are of.
    steps: Any = None
    forwards: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return Runtime()

    def __reduce__(self) -> tuple[type[Runtime], tuple[()]]:
        return Runtime, ()


@contextmanager
def fitting(bnn: Any, train: bool) -> Iterator[None]:
    """Run a BNN's net in train or eval mode, and refuse other threads' fits of it, until the end.

    Gradients are recorded inside. A BNN of which some part is in train mode already is fitted in
    its own modes. Modes that a callback changes, and handlers that it leaves behind, are set back
    at the end.
    """
    runtime, own = bnn._runtime, threading.get_ident()
    outer = runtime.fitted_by
    before = [(part, part.training) for part in bnn.modules()]
    try:
        with exclusive():
            if runtime.fitted_by not in (None, own):
                raise RuntimeError(
                    f"another thread is fitting this {type(bnn).__name__}; fit a copy.deepcopy of "
                    "it, or wait for the other fit"
                )
            runtime.fitted_by = own
        modes = bnn._fitted_modes() if train else bnn._modes(train=False)
        with as_before(), outside_inference(gradients=True), in_modes(bnn, modes):
            yield
    finally:
        if runtime.fitted_by == own:
            runtime.fitted_by = outer
        for part, mode in before:
            part.training = mode


@contextmanager
def prior_fixed(bnn: Any, is_fixed: bool = True) -> Iterator[None]:
    """Refuse updates of a BNN's prior inside, on which the objective depends."""
    outer = bnn._runtime.prior_is_fixed
    bnn._runtime.prior_is_fixed = is_fixed
    try:
        yield
    finally:
        bnn._runtime.prior_is_fixed = outer
