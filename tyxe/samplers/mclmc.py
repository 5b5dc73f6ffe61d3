"""Microcanonical Langevin Monte Carlo, all chains in one tensor and in step.

There is no accept step. The step size is set so that the energy's error has a given variance in
each dimension, which bounds the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.kernel import Chains, Kernel, Length, Randomness, Transition, choose
from tyxe.samplers.potential import Point, Potential, minimal_norm, refreshed


class MCLMCState(NamedTuple):
    """Where chains are, and their unit velocities `(chains, d)`."""

    point: Point
    velocity: Tensor


class Settings(NamedTuple):
    """Numbers that the warm-up sets: step sizes and decoherence lengths, `(chains,)`."""

    step_size: Tensor
    length: Tensor


class Adaptation(NamedTuple):
    """What the warm-up remembers, for each chain.

    Attributes:
        largest: a cap on step sizes, lowered where a step was not finite.
        weight, moment: running sums from which the step size follows, in double precision, because
            the second has its sixth power.
        total, mean, spread: of the positions, weighted by step sizes: the sum of weights, the mean
            and the variance.
    """

    largest: Tensor
    weight: Tensor
    moment: Tensor
    total: Tensor
    mean: Tensor
    spread: Tensor


@dataclass(frozen=True)
class MCLMC(Kernel):
    """Microcanonical Langevin dynamics, a kernel of `MCMC_BNN`.

    A transition is a step with two gradients. If the result is not finite, it is undone and the
    chain turns back.

    Args:
        step_size: the first one; without a warm-up it does not change.
        momentum_length: the distance after which the direction is forgotten; by default the square
            root of the summed variances of the positions in the last tenth of the warm-up.
        energy_variance: target variance of the energy error of a step, for each dimension; two
            numbers for one that falls linearly from the first to the second over nine tenths of the
            warm-up. The default is for nets; 5e-4 gives variances of Gaussians within some percent.
        memory: number of steps over which the step size is averaged.
        temperature: `MCMC_BNN` divides the log-likelihood by it, but not the prior.

    Raises:
        TypeError, ValueError: numbers that are not positive.

    Reference:
        Robnik, De Luca, Silverstein, Seljak 2022-24; Sommer et al. 2025, for nets.
    """

    statistics: ClassVar[tuple[str, ...]] = ("energy_error", "undone")
    noises: ClassVar[int] = 2
    uniforms: ClassVar[int] = 0

    step_size: float = check.field(1e-3, check.number, above=0)
    momentum_length: float | None = check.field(None, check.number, above=0)
    energy_variance: float | tuple[float, float] = (0.5, 0.1)
    memory: float = check.field(100.0, check.number, above=1)
    temperature: float = check.field(1.0, check.number, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for variance in self._variances():
            check.number("energy_variance", variance, above=0)

    def _variances(self) -> tuple[float, float]:
        """Return the wanted variance at the start of the warm-up, and at its end."""
        given = self.energy_variance
        first, last = given if isinstance(given, tuple) else (given, given)
        return first, last

    def start(self, potential: Potential, position: Tensor, random: Randomness) -> Chains:
        """Return chains at their starts `(chains, d)` with random directions."""
        noise, d = random.noise[0], position.shape[-1]
        check.count("the number of dimensions", d, 2, ", in which MCLMC moves; take NUTS")
        point = Point.at(potential, position)
        one, zero = torch.ones_like(point.potential), torch.zeros_like(position)
        none, length = torch.zeros_like(one), self.momentum_length or max(d**0.5, 15.0)
        return Chains(
            MCLMCState(point, noise / noise.norm(dim=-1, keepdim=True)),
            Settings(self.step_size * one, length * one),
            Adaptation(torch.inf * one, none.double(), none.double(), none, zero, zero),
        )

    def step(
        self, potential: Potential, state: MCLMCState, settings: Settings, random: Randomness
    ) -> tuple[MCLMCState, Transition]:
        """Return chains after one step, with its energy's error over the root of `d`."""
        time, length = settings.step_size[:, None], settings.length[:, None]
        velocity = refreshed(state.velocity, random.noise[0], 0.5 * time, length)
        point, turned, error = minimal_norm(potential, state.point, velocity, time)
        finite = error.isfinite() & (point.gradient.isfinite() & turned.isfinite()).all(-1)
        # Going back keeps the law, and a chain does not run at the same wall again.
        velocity = choose(finite, turned, -velocity)
        velocity = refreshed(velocity, random.noise[1], 0.5 * time, length)
        after = MCLMCState(choose(finite, point, state.point), velocity)
        error = torch.where(finite, error, 0) * velocity.shape[-1] ** -0.5
        statistics = torch.stack([error, (~finite).to(error.dtype)], -1)
        transition = Transition(
            torch.ones_like(finite), after.point.position, after.point.potential, statistics
        )
        return after, transition

    def plan(self, length: Length) -> Tensor:
        """Return the target variance, whether moments are taken, and which step is the last."""
        num_steps, (first, last) = length.num_warmup, self._variances()
        steps = torch.arange(num_steps, dtype=torch.double, device="cpu")
        share = (steps / max(0.9 * num_steps, 1)).clamp(max=1)
        rows = [first + (last - first) * share, steps >= 0.9 * num_steps, steps == num_steps - 1]
        return torch.stack([row.to(steps.dtype) for row in rows], -1)

    def adapt(
        self,
        before: Chains,
        state: MCLMCState,
        transition: Transition,
        warm: Tensor,
        rows: Tensor,
        random: Randomness,
    ) -> Chains:
        (step_size, length), adaptation = before.settings, before.adaptation
        position, (error, undone) = transition.position, transition.statistics.unbind(-1)
        variance, taken, last = rows.unbind(-1)
        finite = undone == 0
        largest = torch.where(finite, adaptation.largest, 0.8 * step_size)

        xi = error.double().square() / variance + 1e-8
        share = torch.exp(-0.5 * (xi.log() / 9.0).square()) * finite
        decay = 1 - 2 / (self.memory + 1) * finite.double()
        weight = decay * adaptation.weight + share
        moment = decay * adaptation.moment + share * xi / step_size.double() ** 6
        found = torch.where(weight > 0, (moment / weight) ** (-1 / 6), step_size)

        # Of two steps on, a mean of weights: those of the last tenth, by their sizes.
        added = step_size * finite * (taken > 0)
        total = adaptation.total + added
        part = (added / total.clamp(min=torch.finfo(total.dtype).tiny))[:, None]
        deviation = position - adaptation.mean
        mean = adaptation.mean + part * deviation
        spread = adaptation.spread + part * (deviation * (position - mean) - adaptation.spread)
        if self.momentum_length is None:
            width = spread.sum(-1).sqrt()
            length = torch.where((last > 0) & (width > 0), width, length)
        after = Chains(
            state,
            Settings(torch.minimum(found.to(largest.dtype), largest), length),
            Adaptation(largest, weight, moment, total, mean, spread),
        )
        return choose(warm, after, before._replace(state=state))

    def check(self, num_warmup: int) -> str | None:
        """Return a warning for a warm-up of fewer than 1,000 steps."""
        if num_warmup >= 1000 or (not num_warmup and self.momentum_length is not None):
            return None
        return (
            f"warmup_steps={num_warmup} is too short for MCLMC to find its step size and length: "
            "take some thousands (each is two gradients), or none with a step_size and a "
            "momentum_length of your own"
        )

    def progress(self, statistics: dict[str, Tensor]) -> dict[str, float]:
        """Return the variance of the energy's error, and the share of undone steps."""
        error, undone = (statistics[name] for name in self.statistics)
        return {"energy variance": float(error.square().mean()), "undone": float(undone.mean())}

    def advice(self, statistics: dict[str, Tensor]) -> list[str]:
        """Return advice on energy errors above the target, and on undone steps."""
        found = []
        # By the median, as the tuning gives outliers no weight: at kinks of a net they are large.
        variance = float(statistics["energy_error"].square().median()) / 0.455  # of a Normal
        wanted = self._variances()[1]
        if variance > 3 * wanted:
            found.append(
                f"the variance of the energy's error is {variance:.2g} a dimension, where "
                f"{wanted:.2g} was wanted, and draws may be too wide: warm up longer, or start "
                "nearer to the posterior (init=tyxe.samplers.warm_start(...))"
            )
        share = float(statistics["undone"].mean())
        if share > 0.01:
            found.append(
                f"{share:.1%} of the steps were not finite and were undone: lower energy_variance"
            )
        return found
