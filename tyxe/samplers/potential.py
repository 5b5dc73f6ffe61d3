"""Potentials of all chains at once, from that of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from tyxe.errors import warn

__all__ = ["Potential", "batched", "for_each"]

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
    gradients = for_each(grad_and_value(energy), position)

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = gradients(position)
        return value, gradient

    return potential


def for_each(one: Callable[..., Any], *tried: Tensor) -> Callable[..., Any]:
    """Return a function of all chains from that of one, by `vmap` or with a warning by a loop.

    Args:
        one: takes tensors of a chain, and returns nested tuples of tensors.
        tried: arguments whose first dimension counts chains, to see whether `vmap` takes it.
    """
    together = vmap(one)

    def by_loop(*given: Tensor) -> Any:
        found = [one(*row) for row in zip(*given, strict=True)]
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
