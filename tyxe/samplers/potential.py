"""Potentials of all chains at once, from that of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tyxe import check
from tyxe.errors import warn

# From positions `(chains, d)` to potentials `(chains,)`, in nats, and gradients `(chains, d)`.
Potential = Callable[[Tensor], tuple[Tensor, Tensor]]


@check.arguments
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
    check.shape("position", position, ("chains", "d"))
    found = gradients(energy, position)
    return lambda position: found(position)[::-1]


def in_turn(one: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the gradients and values of a function of one chain, at one chain after the other.

    It takes more nets than `torch.func.grad` does, such as those with custom functions.
    """

    def all_chains(*given: Iterable[Any]) -> tuple[Tensor, Tensor]:
        found = []
        for point, *others in zip(*given, strict=True):
            with torch.enable_grad():
                point = point.detach().requires_grad_()
                value = one(point, *others)
                found.append((torch.autograd.grad(value, point)[0], value.detach()))
        # One chain is not copied.
        gradient, value = (
            parts[0][None] if len(parts) == 1 else torch.stack(parts)
            for parts in zip(*found, strict=True)
        )
        return gradient, value

    return all_chains


def gradients(one: Callable[..., Tensor], *tried: Tensor) -> Callable[..., Any]:
    """Return the gradients and values of a function at all chains, by `vmap` or by a loop.

    `one` takes tensors of a chain, of which the first is differentiated. `tried` are arguments
    whose first dimension counts chains, to see whether `vmap` takes it; if not, there is a warning.
    """
    together, by_loop = vmap(grad_and_value(one)), in_turn(one)
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
