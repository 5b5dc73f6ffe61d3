"""A scalar function of one vector and its gradient, traced once and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["CompiledFunction"]

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

# Operations with one of these tags may differ between calls, and a trace does not show it.
_NOT_FIXED = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class CompiledFunction:
    """A scalar function of a vector whose value and gradient are one compiled program.

    The program is compiled at the first call from the tensor operations of one evaluation and its
    gradient. If the operations might depend on values, by control flow, random numbers or shapes,
    this raises a RuntimeError.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self._program: ValueAndGradient | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the function's value, which is differentiable once."""
        if self._program is None:
            self._program = _compiled(self.function, x.detach())
        value: Tensor = _WithGradient.apply(x, self._program)
        return value

    def __getstate__(self) -> dict[str, Any]:
        # Other processes compile again, for which torch has the code in its cache.
        return {**self.__dict__, "_program": None}


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, program: ValueAndGradient) -> Tensor:
        value, gradient = program(x)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None


def _compiled(function: Callable[[Tensor], Tensor], x: Tensor) -> ValueAndGradient:
    def value_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            value = function(leaf)
            (gradient,) = torch.autograd.grad(value, leaf)
        return value.detach(), gradient

    # Not by torch.compile, whose guards cost more at each call than the program itself; here the
    # shapes are fixed, and no Python is left. Validation would be control flow on values.
    with pyro.validation_enabled(False):
        program: ValueAndGradient = torch._inductor.compile(_traced(value_and_gradient, x), [x])
        _compare(program, value_and_gradient, x)
    return program


def _traced(function: ValueAndGradient, x: Tensor) -> torch.fx.GraphModule:
    try:
        graph = make_fx(function)(x)
    except RuntimeError as error:
        raise RuntimeError(
            f"compile=True cannot follow this net: {error}; leave compile out"
        ) from error
    for node in graph.graph.nodes:
        tags = _NOT_FIXED.intersection(getattr(node.target, "tags", ()))
        if tags:
            raise RuntimeError(
                f"compile=True cannot follow this net: what {node.target} returns depends on more "
                f"than the shapes of its inputs ({', '.join(t.name for t in tags)}); "
                "leave compile out"
            )
    return graph


@torch.no_grad()
def _compare(program: ValueAndGradient, function: ValueAndGradient, x: Tensor) -> None:
    """Compare at two points, because a trace does not show that results depend on Python state."""
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    steps = torch.arange(x.numel(), dtype=x.dtype, device=x.device)
    for at in (x, x + 0.1 * torch.sin(steps)):
        for found, expected in zip(program(at), function(at), strict=True):
            error = torch.linalg.vector_norm(found - expected)
            if not (error <= tolerance * torch.linalg.vector_norm(expected)):  # also where NaN
                raise RuntimeError(
                    "compile=True gives another potential than this net: its forward depends on "
                    "more than weights and inputs; leave compile out"
                )
