"""Potentials of all chains at once, from that of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from tyxe.errors import warn

# From positions `(chains, d)` to potentials `(chains,)`, in nats, and gradients `(chains, d)`.
Potential = Callable[[Tensor], tuple[Tensor, Tensor]]


def batched(energy: Callable[[Tensor], Tensor], position: Tensor) -> Potential:
    """Return the potential of all chains, by `vmap`, or by a loop where `vmap` refuses it.

    A loop gives a warning with the reason.

    Args:
        energy: a function from a vector `(d,)` to a number, in nats, differentiable by PyTorch.
        position: where it is tried, `(chains, d)`.

    Example:
        >>> potential = batched(lambda w: 0.5 * w.square().sum(), torch.ones(1, 2))
        >>> potential(torch.tensor([[3.0, 4.0]]))
        (tensor([12.5000]), tensor([[3., 4.]]))
    """
    found = gradients(energy, position)

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = found(position)
        return value, gradient

    return potential


def by_autograd(one: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the gradient and the value of a function of one chain.

    It takes more nets than `torch.func.grad` does, such as those with custom functions.
    """

    def alone(point: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            point = point.detach().requires_grad_()
            value = one(point, *others)
            return torch.autograd.grad(value, point)[0], value.detach()

    return alone


def gradients(one: Callable[..., Tensor], *tried: Tensor) -> Callable[..., Any]:
    """Return the gradients and values of a function at all chains, by `vmap` or by a loop.

    A loop gives a warning with the reason.

    Args:
        one: takes tensors of a chain, of which the first is differentiated, and returns a number.
        tried: arguments whose first dimension counts chains, to see whether `vmap` takes it.
    """
    together = vmap(grad_and_value(one))

    alone = by_autograd(one)

    def by_loop(*given: Tensor) -> Any:
        found = [alone(*row) for row in zip(*given, strict=True)]
        return tree_map(lambda *parts: torch.stack(parts), *found)

    # What a loop refuses as well is an error of the function's own.
    try:
        together(*tried)
    except Exception as refused:
        by_loop(*tried)
        reason = str(refused).strip().split("\n")[0]
        warn(
            "the chains run one after the other in a loop, which is slower, since torch.vmap does "
            f"not take this net: {reason}"
        )
        return by_loop
    return together
