"""A BNN's net on one batch, at several draws of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tyxe.bnn.base import BNN
from tyxe.bnn.standin import StandIn
from tyxe.poutine.report import note
from tyxe.predictive.norms import Statistics
from tyxe.predictive.prefix import SiteFreePrefix
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.threads import exclusive
from tyxe.util import Inputs, in_function_transform, kind_of_batch


class NetOnBatch:
    """A net on one batch, as a function of the values of its sites.

    One stand-in runs all passes, so that no gradient may be taken through an earlier one. Modules
    that no site reaches run in the first pass, and what they return is kept. A net can hand a draw
    over where this is not seen, such as in a global, for which `look` is.

    Args:
        bnn: the BNN.
        inputs: the batch.
        keeps: whether there are passes for which something is to be kept.
    """

    def __init__(self, bnn: BNN, inputs: Inputs, keeps: bool) -> None:
        self._bnn, self._inputs, self._keeps = bnn, inputs, keeps
        self._stand_in: StandIn | None = None
        self._prefix: SiteFreePrefix | None = None
        self._passes, self._first = 0, None

    def __call__(self, values: Mapping[str, Tensor], statistics: Statistics | None = None) -> Any:
        """Return the net's output.

        Args:
            values: a value for each site, by joint name.
            statistics: of norms, in the place of their own.
        """
        if self._stand_in is None:
            self._stand_in = self._bnn._stand_in(values, statistics)
            self._prefix = self._prefix_of(self._stand_in)
        else:
            self._stand_in.put(self._bnn._tensors_at(values), statistics)
        if self._prefix is None or self._passes > 1 or in_function_transform():
            return self._stand_in(self._inputs, self._prefix)
        self._passes += 1
        if self._passes > 1 and kind_of_batch(self._inputs) not in self._bnn._runtime.compared:
            return self._compared(self._stand_in)
        self._first = self._stand_in(self._inputs, self._prefix)
        return self._first

    def look(self, draws: Iterable[Mapping[str, Tensor]]) -> None:
        """Make the first two passes, for passes in a transform that cannot be compared.

        Args:
            draws: values of the sites, of which the first two are taken.
        """
        if self._keeps and kind_of_batch(self._inputs) not in self._bnn._runtime.compared:
            for values in islice(draws, 2):
                self(values)

    def _compared(self, stand_in: StandIn) -> Any:
        """Return the output of the second pass, after a comparison with one of the whole net."""
        runtime = self._bnn._runtime
        with exclusive():
            numbers = torch_rng()
            output = stand_in(self._inputs, self._prefix)
            if self._prefix is None or not self._prefix.has_kept:
                return output
            set_torch_rng(numbers)
            whole = stand_in(self._inputs)
        if not _is_same(output, whole):
            self._prefix, runtime.keeps_prefix = None, False
        elif not _is_same(self._first, whole):  # or the two draws are one, and nothing is known
            runtime.compared.add(kind_of_batch(self._inputs))
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


def _is_same(one: Any, other: Any) -> bool:
    (leaves, place), (others, other_place) = tree_flatten(one), tree_flatten(other)
    pairs = zip(leaves, others, strict=False)
    same = (torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in pairs if isinstance(a, Tensor))
    return place == other_place and all(same)
