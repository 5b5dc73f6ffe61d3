"""A BNN's net on one batch, at several draws of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tyxe.bnn.base import BNN
from tyxe.bnn.standin import StandIn
from tyxe.poutine.report import note
from tyxe.predictive.norms import Statistics
from tyxe.predictive.prefix import SiteFreePrefix
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.threads import exclusive
from tyxe.util import Inputs, in_function_transform, kind_of_batch, same_numbers


class NetOnBatch:
    """A net on one batch, as a function of the values of its sites.

    One stand-in runs all passes; where gradients are recorded, which may be taken through earlier
    ones, each has its own. Modules that no site reaches run in the first pass, and what they return
    is kept. A net can hand a draw over where this is not seen, such as in a global. So passes are
    compared with those of the whole net, until one at another draw than the first has been the
    same.

    `keeps` says whether there are passes for which something is to be kept.
    """

    def __init__(self, bnn: BNN, inputs: Inputs, keeps: bool) -> None:
        self._bnn, self._inputs, self._keeps = bnn, inputs, keeps
        self._stand_in: StandIn | None = None
        self._prefix: SiteFreePrefix | None = None
        self._first: Any = None

    def __call__(self, values: Mapping[str, Tensor], statistics: Statistics | None = None) -> Any:
        """Return the net's output at values of the sites, with statistics of norms for its own."""
        if torch.is_grad_enabled():
            return self._bnn._stand_in(values, statistics)(self._inputs)
        if self._stand_in is None:
            self._stand_in = self._bnn._stand_in(values, statistics)
            self._prefix = self._prefix_of(self._stand_in)
        else:
            self._stand_in.put(self._bnn._tensors_at(values), statistics)
        if self._prefix is None or self._is_known():
            return self._stand_in(self._inputs, self._prefix)
        if in_function_transform():  # where nothing can be compared
            return self._stand_in(self._inputs)
        if self._first is None:
            self._first = self._stand_in(self._inputs, self._prefix)
            return self._first
        return self._compared(self._stand_in, self._prefix)

    def look(self, draws: Iterable[Mapping[str, Tensor]]) -> None:
        """Make passes until one has been compared, for passes in a transform, where none can be."""
        for values in draws if self._keeps else ():
            if not self._is_known():
                self(values)

    def _is_known(self) -> bool:
        """Whether passes have been compared for such batches, and the net has not changed since."""
        return self._kind() in self._bnn._runtime.compared

    def _kind(self) -> Any:
        return kind_of_batch(self._inputs), self._bnn._outline.version

    def _compared(self, stand_in: StandIn, prefix: SiteFreePrefix) -> Any:
        """Return the output of a pass, after a comparison with one of the whole net."""
        if not prefix.has_kept:
            self._prefix = None
            return stand_in(self._inputs)
        runtime, kind = self._bnn._runtime, self._kind()
        with exclusive():
            numbers = torch_rng()
            output = stand_in(self._inputs, prefix)
            set_torch_rng(numbers)
            whole = stand_in(self._inputs)
        if not same_numbers(output, whole):
            self._prefix, runtime.keeps_prefix = None, False
        elif not same_numbers(self._first, whole):  # or the two draws are one, and nothing is known
            runtime.compared.add(kind)
            self._first = None
        return whole

    def _prefix_of(self, stand_in: StandIn) -> SiteFreePrefix | None:
        if self._keeps and not self._bnn._runtime.keeps_prefix:
            note(
                "The whole net runs for each draw: what modules without sites return has been seen "
                "to depend on the draw."
            )
        if not self._keeps or not self._bnn._runtime.keeps_prefix:
            return None
        owners = {stand_in.part(part) for slots in self._bnn._slots.values() for part, _ in slots}
        return SiteFreePrefix(stand_in.net, owners, self._inputs)
