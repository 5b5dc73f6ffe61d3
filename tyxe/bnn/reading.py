"""Whether a net reads its sites, which is looked at on the first batch that a BNN meets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves

from tyxe.bnn.standin import StandIn
from tyxe.errors import warn
from tyxe.predictive.forwards import norms_of
from tyxe.rng import torch_rng_kept
from tyxe.threads import only_handlers
from tyxe.util import (
    Inputs,
    graph_nodes,
    in_function_transform,
    outside_inference,
    outside_of_inference,
    same_numbers,
)

if TYPE_CHECKING:
    from tyxe.bnn.base import BNN

Values = Mapping[str, Tensor]


def look_at_sites(
    bnn: BNN, inputs: Inputs, needs_gradients: bool, keywords: Mapping[str, Any] | None = None
) -> None:
    """Warn of sites that a net's outputs do not depend on, once for each BNN.

    A net reaches other parameters than its own by a lambda, a closure or a forward that was
    replaced, since a copy of the net shares these. The net runs once more, with a graph that keeps
    no tensors, and again only where a site is not in the graph. Where the outputs' gradients are to
    be used, a site that they depend on without one is a RuntimeError.
    """
    known = bnn._runtime.read if needs_gradients else bnn._runtime.met
    if bnn._slots.keys() <= known or in_function_transform() or get_proxy_mode() is not None:
        return
    unknown = bnn._slots.keys() - known
    look = _Look(bnn, outside_of_inference(inputs), keywords or {})
    with _apart():
        try:
            left = unknown - look.reached(train=False)
        except Exception:  # of the net or of the batch, which the forward itself is to raise
            return
        left = left and left - look.reached(train=True)
        lost = {name for name in left if look.changes({name})} if look.changes(left) else set()
        lost_here = lost - look.with_gradients(lost) if needs_gradients else set()
    if lost_here:
        raise RuntimeError(
            f"the net's outputs depend on {_listed(lost_here)} without a gradient, as under "
            "torch.no_grad or after detach in its forward: let it record gradients, or hide these "
            "from the prior"
        )
    bnn._runtime.met |= unknown
    bnn._runtime.read |= unknown if needs_gradients else unknown - lost
    if unread := left - lost:
        warn(
            f"the net's outputs do not depend on site {_listed(unread)}, whose draws have no "
            "effect. If the net calls its parts by a lambda, a closure or a replaced forward, "
            "these are the parts of your own net, and not of the BNN's copy: write a method "
            "that uses self. Otherwise hide these sites from the prior"
        )


def unread_sites(bnn: BNN, inputs: Inputs) -> set[str]:
    """Return the sites that a net's outputs do not depend on, in train mode either."""
    look = _Look(bnn, outside_of_inference(inputs), {})
    with _apart():
        left = bnn._slots.keys() - look.reached(train=False)
        left = left and left - look.reached(train=True)
        return {name for name in left if not look.changes({name})}


@contextmanager
def _apart() -> Iterator[None]:
    # A trace takes what the net itself may sample or observe.
    with (
        only_handlers(()),
        poutine.trace(),
        torch_rng_kept(),
        outside_inference(gradients=True),
    ):
        yield


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return ", ".join([first, *others[:4]]) + (f" and {len(others) - 4} more" * (len(others) > 4))


class _Look:
    """Calls of a BNN's net that leave nothing behind, at the values that its sites came with."""

    def __init__(self, bnn: BNN, inputs: Inputs, keywords: Mapping[str, Any]) -> None:
        self._bnn, self._inputs, self._keywords = bnn, inputs, keywords
        self._values = outside_of_inference({n: p.detach() for n, p in bnn._own_values().items()})

    def _run(self, values: Values, train: bool) -> Any:
        bnn = self._bnn
        kept = {id(t): t.detach() for t in bnn.net.parameters()}
        kept |= {id(t): t.clone() for t in bnn.net.buffers()}
        modes = bnn._modes(train)
        if train:  # which may not take single points
            modes = {**modes, **dict.fromkeys(norms_of(bnn.net), False)}
        tensors = kept | bnn._tensors_at(values)
        # Kept, since a backward may run a part of it again.
        self._stand_in = StandIn(bnn.net, bnn._outline, tensors, modes, has_buffers=True)
        return self._stand_in.call_apart(self._inputs, **self._keywords)

    def _leaves(self) -> dict[str, Tensor]:
        return {name: value.clone().requires_grad_() for name, value in self._values.items()}

    def reached(self, train: bool) -> set[str]:
        """Return the sites that are in the graph of the outputs; all for outputs of no tensors."""
        leaves = self._leaves()
        try:
            with saved_tensors_hooks(lambda _: None, _missing):
                outputs = _tensors_in(self._run(leaves, train))
        except RuntimeError:
            # A net that differentiates in its forward needs what it saves. Its own errors return.
            outputs = _tensors_in(self._run(leaves, train))
        if not outputs:
            return {*leaves}
        variables = {id(getattr(node, "variable", None)) for node in graph_nodes(outputs)}
        variables |= {*map(id, outputs)}
        return {name for name, leaf in leaves.items() if id(leaf) in variables}

    def changes(self, names: set[str]) -> bool:
        """Whether other values of some sites change the outputs."""
        moved = {n: _moved(v) if n in names else v for n, v in self._values.items()}
        for train in (False, True) if names else ():
            outputs = []
            for values in (self._values, moved):
                with torch_rng_kept(), torch.no_grad():  # the same random numbers each time
                    outputs.append(_tensors_in(self._run(values, train)))
            if not same_numbers(*outputs):
                return True
        return False

    def with_gradients(self, names: set[str]) -> set[str]:
        """Return those of some sites that a backward reaches, as through a reentrant checkpoint."""
        if not names:
            return set()
        leaves = self._leaves()
        outputs = [t for t in _tensors_in(self._run(leaves, False)) if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [*map(torch.ones_like, outputs)])
        return {name for name in names if leaves[name].grad is not None}


def _missing(_: None) -> Tensor:
    raise RuntimeError("a backward inside of the forward")


def _moved(value: Tensor) -> Tensor:
    """Return other values than some, of the same signs."""
    size = value.abs().mean() + 0.01
    return value + 0.1 * size * (1 + torch.rand_like(value))


def _tensors_in(outputs: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
