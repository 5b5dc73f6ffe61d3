"""Hamiltonian Monte Carlo with trajectories of a fixed number of steps, all chains at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.adaptation import choose
from tyxe.samplers.hamiltonian import MAX_ENERGY_ERROR, Hamiltonian, Settings
from tyxe.samplers.integrators import Point, kinetic_energy, leapfrog
from tyxe.samplers.kernel import Randomness, Transition
from tyxe.samplers.potential import Potential


class HMCState(NamedTuple):
    """A trajectory under way, for each chain.

    Attributes:
        proposal: its start, which is the chain's position.
        energy: of the start.
        point, momentum: its end so far.
        leapfrogs: number of steps made.
    """

    proposal: Point
    energy: Tensor
    point: Point
    momentum: Tensor
    leapfrogs: Tensor


@dataclass(frozen=True)
class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo, a kernel of `MCMC_BNN`.

    Options that are not listed are those of `Hamiltonian`.

    Args:
        num_steps: leapfrog steps of a trajectory.

    Raises:
        TypeError: `num_steps` is no integer.
        ValueError: fewer than one step.
    """

    num_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check.count("num_steps", self.num_steps)

    def begin(self, point: Point, noise: Tensor, coin: Tensor, inverse_mass: Tensor) -> HMCState:
        momentum = noise * inverse_mass.rsqrt()
        energy = point.potential + kinetic_energy(momentum, inverse_mass)
        return HMCState(point, energy, point, momentum, torch.zeros_like(energy, dtype=torch.long))

    def step(
        self, potential: Potential, state: HMCState, settings: Settings, random: Randomness
    ) -> tuple[HMCState, Transition]:
        step_size, inverse_mass = settings
        point, momentum = leapfrog(
            potential, state.point, state.momentum, step_size[:, None], inverse_mass
        )
        gain = state.energy - point.potential - kinetic_energy(momentum, inverse_mass)
        gain = gain.nan_to_num(nan=-torch.inf)
        leapfrogs = state.leapfrogs + 1
        done = leapfrogs == self.num_steps
        proposal = choose(done & (random.uniforms[0].log() < gain), point, state.proposal)
        diverged = gain < -MAX_ENERGY_ERROR
        found = [gain.clamp(max=0).exp(), leapfrogs, diverged]
        statistics = torch.stack([one.to(gain.dtype) for one in found], -1)
        same = HMCState(state.proposal, state.energy, point, momentum, leapfrogs)
        anew = self.begin(proposal, random.noise[0], random.uniforms[2], inverse_mass)
        transition = Transition(done, proposal.position, proposal.potential, statistics)
        return choose(done, anew, same), transition
