"""Several steps of all chains in one launch, for devices on which launches take the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Size, Tensor

from tyxe.samplers.kernel import Chains, Kernel, Randomness, Transition
from tyxe.samplers.potential import Potential

# Steps of one launch at most, and numbers that their positions have, which bounds the memory.
MOST_STEPS, MOST_NUMBERS = 32, 2**22


def steps_at_once(shape: Size) -> int:
    """Return how many steps of chains `(chains, d)` one launch makes."""
    return max(1, min(MOST_STEPS, MOST_NUMBERS // shape.numel()))


def whole_step(
    kernel: Kernel, potential: Potential, plan: Tensor, adapts: bool
) -> Callable[[Chains, Tensor, Randomness], tuple[Chains, Tensor, Transition]]:
    """Return a step with the adaptation after it, and no branch that depends on numbers.

    It takes and returns chains and how many transitions each has made.
    """

    def step(
        chains: Chains, transitions: Tensor, random: Randomness
    ) -> tuple[Chains, Tensor, Transition]:
        state, transition = kernel.step(potential, chains.state, chains.settings, random)
        after = chains._replace(state=state)
        if adapts:
            warm = transition.done & (transitions < len(plan))
            rows = plan.index_select(0, transitions.clamp(max=len(plan) - 1))
            after = kernel.adapt(chains, state, transition, warm, rows, random)
        return after, transitions + transition.done, transition

    return step


def several(step: Callable[..., Sequence[Tensor]], count: int) -> Callable[..., list[Tensor]]:
    """Return so many steps as one function of leaves.

    Args:
        step: the leaves of a `whole_step`.
        count: the number of steps.

    Returns:
        A function of the leaves of chains and counts, and of `Randomness` with a first dimension
        of steps. It returns the former, and a `Transition` with such a dimension.
    """

    def steps(*leaves: Tensor) -> list[Tensor]:
        *carried, noise, uniforms = leaves
        size, brought = len(carried), []
        for number in range(count):
            found = step(*carried, noise[number], uniforms[number])
            carried, transition = [*found[:size]], found[size:]
            brought.append(transition)
        return [*carried, *map(torch.stack, zip(*brought, strict=True))]

    return steps
