"""Several steps of all chains in one launch, for devices on which launches take the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Size, Tensor

from tyxe.samplers.kernel import Chains, Randomness, Transition

# Steps of one launch at most, and numbers that their positions have, which bounds the memory.
MOST_STEPS, MOST_NUMBERS = 32, 2**22


def steps_at_once(shape: Size) -> int:
    """Return how many steps of chains `(chains, d)` one launch makes."""
    return max(1, min(MOST_STEPS, MOST_NUMBERS // shape.numel()))


def several(
    step: Callable[..., tuple[Any, Transition]],
    adapt: Callable[..., Chains] | None,
    plan: Tensor,
    place: pytree.TreeSpec,
) -> Callable[..., list[Tensor]]:
    """Return several steps, and the adaptation after each, as one function that reads no number.

    Args:
        step: that of a kernel for its potential.
        adapt: that of the kernel, or None where no chain adapts.
        plan: of the kernel.
        place: the structure of chains and counts of their transitions.

    Returns:
        A function of the leaves of these, and of `Randomness` with a first dimension of steps. It
        returns the former, and those of a `Transition` with such a dimension.
    """

    def steps(*leaves: Tensor) -> list[Tensor]:
        *carried, noise, uniforms = leaves
        chains, transitions = pytree.tree_unflatten(carried, place)
        brought = []
        for random in map(Randomness, noise.unbind(), uniforms.unbind()):
            state, transition = step(chains.state, chains.settings, random)
            after = chains._replace(state=state)
            if adapt is not None:
                warm = transition.done & (transitions < len(plan))
                rows = plan.index_select(0, transitions.clamp(max=len(plan) - 1))
                after = adapt(chains, state, transition, warm, rows, random)
            chains, transitions = after, transitions + transition.done
            brought.append(transition)
        together = map(torch.stack, zip(*brought, strict=True))
        return [*pytree.tree_leaves((chains, transitions)), *together]

    return steps
