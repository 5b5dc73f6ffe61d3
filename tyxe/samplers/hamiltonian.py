"""Hamiltonian Monte Carlo, and the warm-up that it shares with NUTS, for all chains at once."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.kernel import (
    Chains,
    DualAveraging,
    Kernel,
    Length,
    Moments,
    Randomness,
    Transition,
    choose,
    windows,
)
from tyxe.samplers.potential import Point, Potential, kinetic_energy, leapfrog

# An energy that is larger than at the start by this has diverged.
MAX_ENERGY_ERROR = 1000.0


class Settings(NamedTuple):
    """What the warm-up sets: step sizes `(chains,)`, diagonals of inverse masses `(chains, d)`."""

    step_size: Tensor
    inverse_mass: Tensor


class Adaptation(NamedTuple):
    """What the warm-up remembers."""

    averaging: DualAveraging
    moments: Moments


@dataclass(frozen=True)
class Hamiltonian(Kernel):
    """Base of kernels that follow Hamiltonian dynamics by leapfrog steps.

    Args:
        step_size: the first one, for all chains.
        adapt_step_size: reach `target_accept_prob` by dual averaging during warm-up.
        adapt_mass_matrix: set the diagonal mass matrix by the variances of windows of the warm-up.
        target_accept_prob: the target of the mean acceptance probability.
        temperature: `MCMC_BNN` divides the log-likelihood by it, but not the prior.

    Raises:
        TypeError, ValueError: a step size that is not positive; a target outside of (0, 1).
    """

    statistics: ClassVar[tuple[str, ...]] = ("acceptance", "leapfrogs", "diverged")
    noises: ClassVar[int] = 1
    uniforms: ClassVar[int] = 3

    step_size: float = check.field(1.0, check.number, above=0)
    adapt_step_size: bool = check.field(True, check.flag)
    adapt_mass_matrix: bool = check.field(True, check.flag)
    target_accept_prob: float = check.field(0.8, check.number, above=0, below=1)
    temperature: float = check.field(1.0, check.number, above=0)

    @abstractmethod
    def begin(self, point: Point, noise: Tensor, coin: Tensor, inverse_mass: Tensor) -> Any:
        """Return the state at the start of a transition, from `(chains, d)` and `(chains,)`."""

    def start(self, potential: Potential, position: Tensor, random: Randomness) -> Chains:
        """Return chains at their starts, `(chains, d)`, with a reasonable step size."""
        inverse_mass = torch.ones_like(position)
        point = Point.at(potential, position)
        step_size = torch.full_like(point.potential, self.step_size)
        noise = random.noise[0]
        if self.adapt_step_size:
            step_size = reasonable_step_size(potential, point, step_size, inverse_mass, noise)
        return Chains(
            self.begin(point, noise, random.uniforms[2], inverse_mass),
            Settings(step_size, inverse_mass),
            Adaptation(DualAveraging.start(step_size), Moments.start(position)),
        )

    def plan(self, length: Length) -> Tensor:
        """Return whether a transition adds to the mass matrix, ends a window, and is the last."""
        collects, ends = windows(length.num_warmup)
        last = torch.arange(length.num_warmup, device="cpu") == length.num_warmup - 1
        return torch.stack([collects, ends, last], -1)

    def adapt(
        self,
        before: Chains,
        state: Any,
        transition: Transition,
        warm: Tensor,
        rows: Tensor,
        random: Randomness,
    ) -> Chains:
        settings, (averaging, moments) = before.settings, before.adaptation
        step_size, inverse_mass = settings
        collects, ends, last = (warm & row for row in rows.unbind(-1))
        if self.adapt_step_size:
            adapted = averaging.updated(transition.statistics[:, 0], self.target_accept_prob)
            averaging = choose(warm, adapted, averaging)
            step_size = torch.where(warm, averaging.log_step.exp(), step_size)
        if self.adapt_mass_matrix:
            moments = choose(collects, moments.updated(transition.position), moments)
            inverse_mass = choose(ends, moments.variance(), inverse_mass)
            moments = choose(ends, Moments.start(transition.position), moments)
            # The momentum that was drawn by the old mass is drawn by the new one.
            anew = self.begin(state.proposal, random.noise[0], random.uniforms[2], inverse_mass)
            state = choose(ends, anew, state)
            if self.adapt_step_size:
                again = DualAveraging.start(averaging.log_average.exp())
                averaging = choose(ends, again, averaging)
                step_size = torch.where(ends, averaging.log_step.exp(), step_size)
        if self.adapt_step_size:
            step_size = torch.where(last, averaging.log_average.exp(), step_size)
        return Chains(state, Settings(step_size, inverse_mass), Adaptation(averaging, moments))

    def check(self, num_warmup: int) -> str | None:
        """Return a warning for fewer transitions than Stan's minimum of 150."""
        what = {"step sizes": self.adapt_step_size, "mass matrices": self.adapt_mass_matrix}
        adapted = " and ".join(name for name, adapts in what.items() if adapts)
        if not adapted or num_warmup >= 150:
            return None
        return (
            f"warmup_steps={num_warmup} is too short to adapt {adapted}: take some "
            "hundreds, or pass adapt_step_size=False and adapt_mass_matrix=False"
        )

    def advice(self, statistics: dict[str, Tensor]) -> list[str]:
        """Return advice on transitions that diverged."""
        share = float(statistics["diverged"].double().mean())
        if not share:
            return []
        return [
            f"{share:.1%} of the transitions diverged, and parts of the posterior may be missing: "
            "raise target_accept_prob (to .95, say), warm up longer, or take a prior that bounds "
            "scales away from zero"
        ]


def reasonable_step_size(
    potential: Potential, point: Point, step_size: Tensor, inverse_mass: Tensor, noise: Tensor
) -> Tensor:
    """Double or halve step sizes until one step's acceptance probability crosses 0.8.

    Reference:
        Hoffman, Gelman 2014, algorithm 4, with Stan's threshold.
    """
    momentum = noise * inverse_mass.rsqrt()
    energy = point.potential + kinetic_energy(momentum, inverse_mass)
    threshold = torch.tensor(0.8, dtype=step_size.dtype, device=step_size.device).log()

    def is_accepted(step_size: Tensor) -> Tensor:
        after, turned = leapfrog(potential, point, momentum, step_size[:, None], inverse_mass)
        gain = energy - after.potential - kinetic_energy(turned, inverse_mass)
        return gain.nan_to_num(nan=-torch.inf) > threshold

    grows = is_accepted(step_size)
    active = torch.ones_like(grows)
    # Fifty doublings reach any scale that single precision has.
    for _ in range(50):
        proposed = torch.where(grows, 2 * step_size, 0.5 * step_size)
        step_size = torch.where(active, proposed, step_size)
        active = active & (is_accepted(step_size) == grows)
        if not bool(active.any()):
            break
    return step_size


class HMCState(NamedTuple):
    """A trajectory under way, for each chain, from the proposal and its energy to a point."""

    proposal: Point
    energy: Tensor
    point: Point
    momentum: Tensor
    leapfrogs: Tensor


@dataclass(frozen=True)
class HMC(Hamiltonian):
    """Hamiltonian Monte Carlo with trajectories of a fixed length, a kernel of `MCMC_BNN`.

    Options that are not listed are those of `Hamiltonian`.

    Args:
        num_steps: leapfrog steps of a trajectory.
    """

    num_steps: int = check.field(10, check.count)

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
