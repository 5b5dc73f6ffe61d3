"""Potentials of all chains at once, from that of one, and integrators of their dynamics.

Positions, momenta, unit velocities and diagonals of inverse mass matrices are `(chains, d)`, and
step sizes `(chains, 1)`. A potential is a function from positions to its values `(chains,)`, in
nats, and its gradients `(chains, d)`. A step begins at a point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
