"""Compiled programs, one for each shape of a batch, and the passes of a net as such."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyro
import torch
import torch._inductor
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tyxe.errors import warn
from tyxe.linalg.checks import numbers_unchecked
from tyxe.rng import torch_rng_kept
from tyxe.samplers.program import has_compiler
from tyxe.util import Inputs

# Shapes of batches that are compiled, such as a full one and the last of an epoch.
MOST_PROGRAMS = 4
# Random numbers are those of what runs uncompiled; on CPUs those of compiled code are slow.
OPTIONS: dict[str, Any] = {"fallback_random": True, "size_asserts": False}


class Programs:
    """Compiled programs by the shapes of what they are given.

    What cannot be a program, and shapes beyond the first few, are to run uncompiled, after one
    warning of the former.

    Args:
        what: is compiled, in the plural, for warnings.
        device: that they run on.

    Attributes:
        seconds: that compilation has taken.
    """

    def __init__(self, what: str, device: torch.device) -> None:
        self._what = what
        self._programs: dict[Any, Any] = {}
        self.seconds = 0.0
        self._fails = not has_compiler(device)
        if self._fails:
            warn(f"compile=True needs a C++ compiler, and none is found: {what} run uncompiled")

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the program of a key, made where it is new, or None if there is none."""
        if not self._fails and key not in self._programs and len(self._programs) < MOST_PROGRAMS:
            start = time.perf_counter()
            try:
                self._programs[key] = make()
            except Exception as error:  # of the user's net, the tracer or the compiler
                reason = str(error).partition(" It may be possible")[0].strip().split("\n")[0]
                what = self._what
                warn(f"compile=True: {what} are no program, and run uncompiled: {reason}")
                self._fails = True
            self.seconds += time.perf_counter() - start
        return None if self._fails else self._programs.get(key)


def as_program(function: Callable[..., list[Tensor]], given: Sequence[Tensor]) -> Any:
    """Return a function of `dense` tensors, compiled; it runs twice.

    Raises:
        RuntimeError: a tensor has gaps or overlaps in memory, which a program would not see.
    """
    if broken := [value for value in given if not _is_dense(value)]:
        raise RuntimeError(
            f"a tensor of shape {tuple(broken[0].shape)} and strides {broken[0].stride()} is part "
            "of a larger one: make parameters and buffers contiguous"
        )
    # Copies, since a run changes statistics of norms, and what is given twice would be one.
    copies: list[Any] = [value.clone() for value in given]
    with torch_rng_kept(), pyro.validation_enabled(False), numbers_unchecked(True):
        function(*(value.clone() for value in copies))  # numbers of the prior are read once
        return torch._inductor.compile(make_fx(function)(*copies), copies, options=OPTIONS)


def key_of(batch: Any) -> tuple[Any, ...]:
    """Return what of a batch of tensors a program is made for: its structure and shapes."""
    leaves, place = tree_flatten(batch)
    return str(place), *((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)


def _is_dense(value: Tensor) -> bool:
    # What a copy would have, without one.
    return value.stride() == torch.empty_like(value, device="meta").stride()


def dense(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors of a batch without gaps and overlaps in memory, copies where there are any.

    A program reads memory as it was when it was compiled, for copies, which have none.
    """
    return [leaf if _is_dense(leaf) else leaf.contiguous() for leaf in leaves]


def check_buffers(net: nn.Module, given: Iterable[Tensor]) -> None:
    """Raise a RuntimeError if a forward has replaced a buffer that it was given."""
    known = {id(tensor) for tensor in given}
    replaced = [name for name, buffer in net.named_buffers() if id(buffer) not in known]
    if replaced:
        raise RuntimeError(
            f"the forward replaces {', '.join(replaced)}, of which a program keeps nothing: "
            "change buffers in place"
        )


def are_tensors(leaves: Sequence[Any]) -> bool:
    """Say whether all of a batch can be given to a program."""
    return all(isinstance(leaf, Tensor) for leaf in leaves)


class _Pass(nn.Module):
    """A pass of a BNN's net, as a module whose parameters and buffers can be swapped."""

    def __init__(self, bnn: Any) -> None:
        super().__init__()
        self.bnn = bnn

    def forward(self, values: Mapping[str, Tensor], inputs: Inputs, held: Sequence[Tensor]) -> Any:
        """Return the net's output with values in the places of its sites."""
        found = self.bnn.run_net(values, inputs)
        check_buffers(self.bnn.net, held)
        return found


class CompiledPasses:
    """`SupervisedBNN.run_net` without gradients, as compiled programs.

    A program is of the net as it is: what is no tensor of it, such as a dropout rate, is fixed.
    """

    def __init__(self, bnn: Any) -> None:
        self._pass = _Pass(bnn)
        self._programs = Programs("passes of the net", next(bnn.parameters()).device)

    def __call__(
        self, values: Mapping[str, Tensor], inputs: Inputs, plain: Callable[[], Any]
    ) -> Any:
        """Return the net's output with values in the places of its sites, by joint name.

        Where there is no program it is what `plain` returns.
        """
        bnn, leaves = self._pass.bnn, tree_leaves(inputs)
        if not are_tensors(leaves):
            return plain()
        # The net's, without those whose places the values take.
        places = bnn.in_places()
        taken = {id(place) for place in places.values()}
        parameters = bnn.net.named_parameters(prefix="bnn.net")
        held = {name: p for name, p in parameters if id(p) not in taken}
        held |= dict(bnn.net.named_buffers(prefix="bnn.net"))
        sites = {name: values[name] for name in places}
        given = [*dense(sites.values()), *held.values(), *dense(leaves)]

        def make() -> tuple[Any, list[Any]]:
            place = tree_flatten(inputs)[1]
            returned: list[Any] = []

            def run(*given: Tensor) -> list[Tensor]:
                parts = iter(given)
                drawn = {name: next(parts) for name in sites}
                swapped = {name: next(parts) for name in held}
                batch = tree_unflatten([*parts], place)
                called = (drawn, batch, [*swapped.values(), *drawn.values()])
                found = torch.func.functional_call(self._pass, swapped, called)
                outputs, structure = tree_flatten(found)
                returned[:] = [structure]
                return outputs

            return as_program(run, [value.detach() for value in given]), returned

        found = self._programs.find(key_of((sites, inputs)), make)
        if found is None:
            return plain()
        program, (structure,) = found
        return tree_unflatten([*program(*given)], structure)
