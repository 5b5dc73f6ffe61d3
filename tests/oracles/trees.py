"""The no-U-turn sampler for one chain, by recursion: an oracle for the one without.

As in Hoffman, Gelman 2014 and Betancourt 2017, app. A: multinomial weights, biased progression, the
generalised criterion for U-turns and the two checks across the joint of two subtrees. It keeps a
list of states for a trajectory, so that every sum is taken anew.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Gradient = Callable[[np.ndarray], tuple[float, np.ndarray]]


class State(NamedTuple):
    """A leaf: position, momentum, gradient, and the energy's gain over the start."""

    position: np.ndarray
    momentum: np.ndarray
    gradient: np.ndarray
    gain: float


class Tree(NamedTuple):
    """A finished transition.

    Attributes:
        law: pairs of positions and the probability that each is the transition's result.
        leapfrogs: number of steps.
        depth: number of doublings that were completed.
        diverged: whether an energy error exceeded the bound.
        acceptance: mean acceptance probability of the leaves.
        visited: the positions of all leaves in the order in which they were made.
    """

    law: list[tuple[np.ndarray, float]]
    leapfrogs: int
    depth: int
    diverged: bool
    acceptance: float
    visited: list[np.ndarray]


class Reference:
    """A transition for given directions; its law is over the draws within the trajectory.

    `parts` says which of the three checks of a joint of two halves are made: all of them, unless a
    test asks what the others are for.
    """

    def __init__(
        self,
        gradient: Gradient,
        step_size: float,
        inverse_mass: np.ndarray,
        max_depth: int,
        parts: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        self.parts = parts
        self.gradient, self.step_size = gradient, step_size
        self.inverse_mass, self.max_depth = inverse_mass, max_depth

    def transition(self, position, momentum, directions: Iterator[bool]) -> Tree:
        potential, gradient = self.gradient(position)
        self.start = potential + self.kinetic(momentum)
        self.made: list[State] = []
        self.diverged = False
        trajectory = [State(position, momentum, gradient, 0.0)]
        law = [(trajectory[0], 1.0)]
        depth = 0
        while depth < self.max_depth:
            forward = next(directions)
            new = self.subtree(trajectory[-1 if forward else 0], forward, depth)
            if new is None:
                break
            depth += 1
            ratio = min(1.0, weight(new) / weight(trajectory))
            law = [(leaf, (1 - ratio) * p) for leaf, p in law]
            law += [(leaf, ratio * np.exp(leaf.gain) / weight(new)) for leaf in new]
            left, right = (trajectory, new) if forward else (new, trajectory)
            trajectory = left + right
            if self.turned(left, right):
                break
        gains = [leaf.gain for leaf in self.made]
        return Tree(
            [(leaf.position, p) for leaf, p in law],
            len(gains),
            depth,
            self.diverged,
            float(np.mean([np.exp(min(gain, 0.0)) for gain in gains])),
            [leaf.position for leaf in self.made],
        )

    def kinetic(self, momentum: np.ndarray) -> float:
        return 0.5 * float(momentum @ (self.inverse_mass * momentum))

    def leaf(self, end: State, forward: bool) -> State:
        step = self.step_size if forward else -self.step_size
        half = end.momentum - 0.5 * step * end.gradient
        position = end.position + step * self.inverse_mass * half
        potential, gradient = self.gradient(position)
        momentum = half - 0.5 * step * gradient
        gain = self.start - potential - self.kinetic(momentum)
        gain = -np.inf if np.isnan(gain) else gain
        made = State(position, momentum, gradient, gain)
        self.made.append(made)
        return made

    def subtree(self, end: State, forward: bool, depth: int) -> list[State] | None:
        """Return the leaves from left to right, or None where a part of it is not to be had."""
        if depth == 0:
            leaf = self.leaf(end, forward)
            if leaf.gain < -1000:
                self.diverged = True
                return None
            return [leaf]
        near = self.subtree(end, forward, depth - 1)
        if near is None:
            return None
        far = self.subtree(near[-1 if forward else 0], forward, depth - 1)
        if far is None:
            return None
        left, right = (near, far) if forward else (far, near)
        return None if self.turned(left, right) else left + right

    def turned(self, left: list[State], right: list[State]) -> bool:
        """Judge a trajectory of two halves, and each half with the other's nearest leaf."""
        parts = [left + right, [*left, right[0]], [left[-1], *right]]
        return any(self.is_turned(parts[number]) for number in self.parts)

    def is_turned(self, leaves: list[State]) -> bool:
        along = self.inverse_mass * sum(leaf.momentum for leaf in leaves)
        return min(along @ leaves[0].momentum, along @ leaves[-1].momentum) <= 0


def weight(leaves: list[State]) -> float:
    """Return the summed weight of some leaves."""
    return float(sum(np.exp(leaf.gain) for leaf in leaves))
