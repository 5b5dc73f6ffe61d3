"""A net at draws of its weights as programs, which outlive the prediction they were made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tyxe.autocast import dtype_of_maps
from tyxe.bnn.base import BNN
from tyxe.bnn.compiled import Description, check_are_tensors, what_changes
from tyxe.bnn.passes import unstacked
from tyxe.bnn.standin import Names, StandIn, modes_of, tensors_of
from tyxe.data import Picking
from tyxe.errors import warn
from tyxe.predictive.forwards import MOST_GIVEN, are_alike, has_hooks
from tyxe.program import Program, Programs, check_equal, has_graphs, reason_of
from tyxe.rng import torch_rng, torch_rng_kept
from tyxe.threads import exclusive
from tyxe.util import SITE_PRIORS, Inputs, at_each, kind_of_batch

Values = dict[str, Tensor]

# Kinds of batches, and numbers of draws, for which there are programs of a net.
MOST_SHAPES = 8
# Numbers of the draws of one pass on a processor: more leave its cache, and a pass takes longer.
# What is not random they share, so that it is not counted where there is any.
MOST_CACHED = 2**20


class TracedNet:
    """A net on one batch, as a function of stacked draws that runs as programs.

    A program takes draws, the net's other tensors and the batch. It is compared with the net
    itself at the first draws of a kind. All programs are made anew where a part of the net has
    changed otherwise than in its parameters and buffers. A net without programs, and kinds of
    batches beyond the first few, run as `plain`, a function of stacked draws, after one warning.

    `at_once`: run all draws of a stack in one pass under `torch.vmap`, or one after the other. By
    default they run in one pass, unless a convolution or a recurrent layer is random; large draws
    on a processor run in several.
    """

    def __init__(
        self, bnn: BNN, inputs: Inputs, at_once: bool | None, plain: Callable[[Values], Tensor]
    ) -> None:
        self._bnn, self._inputs, self._plain = bnn, inputs, plain
        random = [*bnn._in_places().values()]
        replaced = bnn._replaced()
        tensors = (t for part in bnn.net.modules() for t in tensors_of(part))
        self._others = [*{id(t): t for t in tensors if id(t) not in replaced}.values()]
        self._device = random[0].device
        given = sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        size = MOST_GIVEN // max(1, given)
        if at_once is None:
            owners = (part for slots in bnn._slots.values() for part, _ in slots)
            convolves = any(own.dim() > 2 for own in random)
            at_once = not convolves and not any(isinstance(part, nn.RNNBase) for part in owners)
            has_body = any(isinstance(other, nn.Parameter) for other in self._others)
            if self._device.type == "cpu" and not has_body:
                size = min(size, MOST_CACHED // sum(own.numel() for own in random))
        self._size = max(1, size) if at_once else 1
        with exclusive():
            self._programs, self._remade = self._programs_of_net()
        self._kind = kind_of_batch((self._others, inputs)), at_once, dtype_of_maps(random[0])

    def __call__(self, stacked: Values) -> Tensor:
        """Return the net's outputs `(S, ...)` at draws that are stacked by site."""
        parts = zip(*(value.split(self._size) for value in stacked.values()), strict=True)
        return torch.cat([self._run(dict(zip(stacked, part, strict=True))) for part in parts])

    def _run(self, values: Values) -> Tensor:
        kind = kind_of_batch(values), self._kind
        with exclusive():
            program = self._programs.find(kind, partial(self._made, values))
        if program is None:
            return self._plain(values)
        found: Tensor = program(values, self._others, self._inputs)
        return found

    def _programs_of_net(self) -> tuple[Programs, Names]:
        """Return the programs of the net as it is now, and what each forward of them makes anew."""
        runtime = self._bnn._runtime
        if runtime.forwards is not None:
            before, described, programs, remade = runtime.forwards
            changes, now = self._described(remade)
            # A net that is refused may change in each forward.
            if before == changes and (described == now or programs.are_none):
                runtime.forwards = changes, now, programs, remade
                return programs, remade
        programs, remade = Programs("predictions", MOST_SHAPES), {}
        runtime.forwards = *self._described(remade), programs, remade
        return programs, remade

    def _described(self, remade: Names) -> tuple[Any, Any]:
        """Return what tells whether the net has changed."""
        bnn = self._bnn
        # Of a stand-in, which has the modes of a prediction, and looks at what has come to the
        # parts. Priors are of no effect.
        stand_in = StandIn(bnn.net, bnn._outline, {}, modes_of(bnn))  # whose parts go with it
        net, known = stand_in.net, [part for part in bnn.net.modules() if part in remade]
        left_out = {stand_in.part(part): remade[part] for part in known}
        net.__dict__.pop(SITE_PRIORS, None)
        given = {id(t) for t in (*net.parameters(), *net.buffers())}
        now = Description(given, left_out=left_out)(net)
        return (bnn._outline.version, has_hooks(bnn.net, Picking)), now

    def _made(self, values: Values) -> Program:
        net, given = self._bnn.net, (values, self._others, self._inputs)
        if has_hooks(net, Picking):
            raise RuntimeError("its hooks would not run")
        check_are_tensors(tree_leaves(self._inputs))
        with torch_rng_kept():
            expected = self._expected(values)
            # Without what the forward makes anew, which is known now.
            described = self._described(self._remade)
            self._bnn._runtime.forwards = *described, self._programs, self._remade
            # Attention is among the operations that may draw, and does not without dropout.
            program = Program(self._forward, *given, how="traced", draws=True)
            check_equal("it", are_alike, [(program(*given), expected)])
        if has_graphs(self._device):
            try:
                program.capture(*given)
            except RuntimeError as error:
                reason = reason_of(error)
                warn(f"compile=True: predictions are not captured in a graph: {reason}")
        return program

    def _expected(self, values: Values) -> Tensor:
        """Return outputs of the net itself, which may not draw, nor leave anything behind."""
        draws, versions = [*unstacked(values)], [t._version for t in self._others]
        stand_in = self._bnn._stand_in(draws[0])
        forward = partial(stand_in.call_apart, self._inputs)
        if reason := what_changes(stand_in, forward, self._others, self._remade):
            raise RuntimeError(reason)
        numbers = torch_rng()
        outputs = [self._bnn._stand_in(draw).call_apart(self._inputs) for draw in draws]
        if not all(map(torch.equal, numbers, torch_rng())):
            raise RuntimeError("its forward draws random numbers")
        if versions != [t._version for t in self._others]:
            raise RuntimeError("its forward writes into buffers")
        return torch.stack(outputs)

    def _forward(self, values: Values, others: list[Tensor], inputs: Inputs) -> Tensor:
        bnn = self._bnn
        swapped = {id(own): value for own, value in zip(self._others, others, strict=True)}

        def at(draw: Values) -> Tensor:
            tensors = swapped | bnn._tensors_at(draw, swapped)
            net = StandIn(bnn.net, bnn._outline, tensors, modes_of(bnn), has_buffers=True)
            found: Tensor = net.call_apart(inputs)
            return found

        draws = [*unstacked(values)]
        return at(draws[0])[None] if len(draws) == 1 else at_each(at, values)
