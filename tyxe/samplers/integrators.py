"""Integrators of Hamiltonian and microcanonical dynamics, for all chains at once.

Positions, momenta, unit velocities and diagonals of inverse mass matrices are `(chains, d)`, and
step sizes `(chains, 1)`. A potential is a function from positions to its values `(chains,)`, in
nats, and its gradients `(chains, d)`. A step begins at a point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tyxe.samplers.potential import Potential


class Point(NamedTuple):
    """Positions `(chains, d)` with their potentials `(chains,)` and gradients `(chains, d)`."""

    position: Tensor
    potential: Tensor
    gradient: Tensor

    @classmethod
    def at(cls, potential: Potential, position: Tensor) -> Point:
        """Return the points of some positions."""
        return cls(position, *potential(position))


def kinetic_energy(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Return `1/2 p^T M^-1 p` of each chain, for a diagonal mass matrix."""
    return 0.5 * (momentum.square() * inverse_mass).sum(-1)


def leapfrog(
    potential: Potential, point: Point, momentum: Tensor, step_size: Tensor, inverse_mass: Tensor
) -> tuple[Point, Tensor]:
    """Return the point and the momentum after one step, whose error is of third order.

    Negative step sizes go back in time.
    """
    half = momentum - 0.5 * step_size * point.gradient
    after = Point.at(potential, point.position + step_size * inverse_mass * half)
    return after, half - 0.5 * step_size * after.gradient


# The coefficient of the second-order scheme with the least error [METHODS 10].
_OUTER = 0.1931833275037836


def _turned(velocity: Tensor, gradient: Tensor, step_size: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit velocities after a force has acted for a time, and the kinetic energy's change.

    No term can overflow: hyperbolic functions are divided by `exp(delta)`.
    """
    d = velocity.shape[-1]
    norm = gradient.norm(dim=-1, keepdim=True)
    direction = -gradient / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    delta = step_size * norm / (d - 1)
    along = (direction * velocity).sum(-1, keepdim=True)
    once, twice = torch.exp(-delta), torch.exp(-2 * delta)
    # (e.u)(cosh - 1) + sinh, and the sum of the hyperbolic terms, each times exp(-delta).
    forward = 0.5 * (1 - twice) + along * (0.5 * (1 + twice) - once)
    turned = velocity * once + direction * forward
    change = (d - 1) * (delta + torch.log(0.5 * (1 + along + (1 - along) * twice)))
    return turned / turned.norm(dim=-1, keepdim=True), change.squeeze(-1)


def minimal_norm(
    potential: Potential, point: Point, velocity: Tensor, step_size: Tensor
) -> tuple[Point, Tensor, Tensor]:
    """Return point, unit velocity and energy error after one step of microcanonical dynamics.

    Two gradients a step, in two dimensions at least; the error of the energy is of third order.
    """
    velocity, first = _turned(velocity, point.gradient, _OUTER * step_size)
    middle = Point.at(potential, point.position + 0.5 * step_size * velocity)
    velocity, second = _turned(velocity, middle.gradient, (1 - 2 * _OUTER) * step_size)
    after = Point.at(potential, middle.position + 0.5 * step_size * velocity)
    velocity, third = _turned(velocity, after.gradient, _OUTER * step_size)
    return after, velocity, first + second + third + after.potential - point.potential


def refreshed(velocity: Tensor, noise: Tensor, time: Tensor, length: Tensor) -> Tensor:
    """Return unit velocities that have forgotten a part of their direction in a time `(chains, 1)`.

    After a time of `length`, the momentum's decoherence length `L`, `(chains, 1)`, a direction is
    correlated with its start by `1/e`. The noise is standard normal, `(chains, d)`.
    """
    strength = (torch.expm1(2 * time / length) / velocity.shape[-1]).sqrt()
    mixed = velocity + strength * noise
    return mixed / mixed.norm(dim=-1, keepdim=True)
