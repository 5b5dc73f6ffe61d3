"""Functions of tensors as compiled programs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tyxe.samplers.potential import Potential

# Operations with one of these tags may differ between calls, and a trace does not show it.
_NOT_FIXED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_REMEDY = "pass compile=False"
# Checks of shapes at each call cost a tenth of a small program. The hyperbolic tangent by exp, off
# by a rounding error of 1 and not of itself, takes half of the time.
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "cpp.use_decompose_tanh": True,
}


def has_compiler(device: torch.device) -> bool:
    """Say whether programs for a device can be compiled here."""
    if device.type == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl"))
    return bool(torch.utils._triton.has_triton())


class Program:
    """A function of nested tuples of tensors, as one of their leaves, and compiled if wanted.

    It is traced once, so that it must be the same operations whatever the numbers are. A compiled
    program has no guards: arguments have to be of the same shapes and types, and those of
    `at_leaves` contiguous.

    Args:
        function: takes and returns nested tuples of tensors.
        arguments: what it is traced with.
        compile: whether it is compiled.

    Attributes:
        at_leaves: the function of leaves, which returns leaves.
        is_compiled: whether that is a compiled program.

    Raises:
        RuntimeError: the operations depend on values, by control flow, random numbers or shapes.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, compile: bool = False
    ) -> None:
        self._function = function
        leaves, self._given = pytree.tree_flatten(arguments)
        self._returned: Any = None
        self.is_compiled = compile
        self.at_leaves: Callable[..., list[Tensor]] = self._eager
        if compile:
            # Copies, because a tensor that is given twice would be one argument of the trace.
            leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
            # Not by torch.compile, whose guards cost more at each call than a small program.
            self.at_leaves = torch._inductor.compile(
                _traced(self._eager, leaves), leaves, options=_OPTIONS
            )

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns."""
        leaves = [leaf.contiguous() for leaf in pytree.tree_leaves(arguments)]
        return self.returned(self.at_leaves(*leaves))

    def returned(self, leaves: Sequence[Tensor]) -> Any:
        """Return the tuples that the function returns from their leaves."""
        return pytree.tree_unflatten(leaves, self._returned)

    def _eager(self, *leaves: Tensor) -> list[Tensor]:
        found = self._function(*pytree.tree_unflatten(leaves, self._given))
        # Programs take and give fixed strides, so that what one gives can be given to it.
        found = pytree.tree_map(Tensor.contiguous, found)
        flat, self._returned = pytree.tree_flatten(found)
        return flat


def _traced(function: Callable[..., Any], leaves: list[Any]) -> torch.fx.GraphModule:
    try:
        graph = make_fx(function)(*leaves)
    except RuntimeError as error:
        # What follows is advice on the tracer, which is ours.
        reason = str(error).partition(" It may be possible")[0].strip().rstrip(".")
        raise RuntimeError(f"this net cannot be compiled: {reason}; {_REMEDY}") from error
    for node in graph.graph.nodes:
        tags = _NOT_FIXED.intersection(getattr(node.target, "tags", ()))
        if tags:
            raise RuntimeError(
                f"this net cannot be compiled: what {node.target} returns depends on more than the "
                f"shapes of its inputs ({', '.join(tag.name for tag in tags)}); {_REMEDY}"
            )
    _widen(graph.graph)
    return graph


def _widen(graph: torch.fx.Graph) -> None:
    """Compute products of few columns transposed, since MKL takes up to five times as long."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, columns = node.meta["val"].shape[1:]
        if not 1 < columns < min(rows, 16):
            continue
        with graph.inserting_before(node):
            left, right = (
                graph.call_function(aten.transpose.int, (one, 1, 2)) for one in reversed(node.args)
            )
            product = graph.call_function(aten.bmm.default, (left, right))
            back = graph.call_function(aten.transpose.int, (product, 1, 2))
            # What follows was traced for these strides.
            how: dict[str, Any] = {"memory_format": torch.contiguous_format}
            back = graph.call_function(aten.clone.default, (back,), how)
        node.replace_all_uses_with(back)
        graph.erase_node(node)


@torch.no_grad()
def check_repeatable(potential: Potential, position: Tensor) -> None:
    """Compare a trace with the function at two points: state of Python's own does not show in one.

    Raises:
        RuntimeError: they differ, or the function cannot be traced.
    """
    graph = _traced(potential, [position])
    steps = torch.arange(position.numel(), dtype=position.dtype, device=position.device)
    for at in (position, position + 0.1 * torch.sin(steps).reshape(position.shape)):
        for found, expected in zip(graph(at), potential(at), strict=True):
            tolerance = torch.finfo(expected.dtype).eps ** 0.5
            error, size = (found - expected).norm(), expected.norm()
            if size.isfinite() and not error <= tolerance * size:
                raise RuntimeError(
                    "this net cannot be compiled: its forward depends on more than weights and "
                    f"inputs; {_REMEDY}"
                )
