"""Langevin dynamics by gradients of mini-batches, with or without momentum: SGLD and SGHMC.

There is no accept step: the bias is of first order in the rate.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.kernel import Chains, Kernel, Length, Randomness, Transition
from tyxe.samplers.potential import Point, Potential

SCHEDULES = ("constant", "polynomial", "cyclical")
# Heights above which a chain has diverged, and up to which its samples are good.
LEFT, SENSIBLE = 1e6, 10.0


class State(NamedTuple):
    """Where chains are, with the gradient of a mini-batch there, and their last moves."""

    point: Point
    velocity: Tensor


class Settings(NamedTuple):
    """Of the next step, `(chains,)`: its rate, 1 or 0 for noise, and the potential at the start."""

    step_size: Tensor
    noise: Tensor
    start: Tensor


@dataclass(frozen=True)
class SGLD(Kernel):
    r"""Stochastic-gradient Langevin dynamics, a kernel of `MCMC_BNN`.

    A transition is a step on one mini-batch, `w <- w - eta grad U + sqrt(2 eta) z`, where `U` is
    the batch's estimate of the potential. A cyclical run has `num_cycles`, in each of which the
    rate falls from `lr` to 0 as a cosine, and takes as many samples from the end of each.

    Args:
        lr: rate for the mean loss of a data point, as in SGD of the plain net: with `N` points
            `eta = lr T / N`. For a `Run` of your own potential it is `eta`.
        temperature: `T`; `MCMC_BNN` divides the log-likelihood by it, but not the prior.
        schedule: `"constant"`; `"polynomial"`, `lr (1 + t / offset)^-power` at step `t`; or
            `"cyclical"`.
        clip_norm: largest norm of the mean loss's gradient; a larger one is scaled down.
        num_cycles: number of cycles of a cyclical run.
        exploration: the first part of each cycle, which has no noise.
        power, offset: parameters of a polynomial schedule.
        points: `N / T`, which `MCMC_BNN` sets.

    Raises:
        TypeError, ValueError: numbers out of range; an unknown schedule.

    References:
        Welling, Teh 2011; Zhang et al. 2020, eq. 1 and algorithm 1, for cycles.

    Example:
        >>> import functools, pyro.distributions as dist, torch, tyxe
        >>> data = [(torch.ones(2, 1), torch.ones(2, 1)), (torch.zeros(2, 1), torch.zeros(2, 1))]
        >>> bnn = tyxe.MCMC_BNN(
        ...     torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5),
        ...     functools.partial(tyxe.samplers.SGLD, lr=0.01))
        >>> run = bnn.fit(data, num_samples=20, warmup_steps=100, thinning=5)
        >>> run.get_samples()["net.weight"].shape
        torch.Size([20, 1, 1])
    """

    statistics: ClassVar[tuple[str, ...]] = ("lr", "gradient_norm")
    noises: ClassVar[int] = 1
    uniforms: ClassVar[int] = 0
    takes_batches: ClassVar[bool] = True
    default_chains: ClassVar[int] = 1
    default_init: ClassVar[str] = "net"
    friction = 1.0  # no field: without momentum

    lr: float = check.field(dataclasses.MISSING, check.number, above=0)
    temperature: float = check.field(1.0, check.number, above=0)
    schedule: str = check.field("constant", check.choice, known=SCHEDULES)
    clip_norm: float | None = check.field(None, check.number, above=0)
    num_cycles: int = check.field(4, check.count)
    exploration: float = check.field(0.8, check.number, least=0, below=1)
    power: float = check.field(0.55, check.number, above=0)
    offset: float = check.field(1000.0, check.number, above=0)
    points: float = check.field(1.0, check.number, above=0)

    def for_points(self, count: float) -> SGLD:
        """Return the kernel whose rate is that of a point's mean loss."""
        return dataclasses.replace(self, points=count / self.temperature)

    def start(self, potential: Potential, position: Tensor, random: Randomness) -> Chains:
        """Return chains at rest at their starts, `(chains, d)`."""
        point = Point.at(potential, position)
        rate = torch.full_like(point.potential, self.lr / self.points)
        is_exploring = self.schedule == "cyclical" and self.exploration > 0
        noise = torch.full_like(rate, float(not is_exploring))
        state = State(point, torch.zeros_like(position))
        return Chains(state, Settings(rate, noise, point.potential), ())

    def randomness(
        self, position: Tensor, generator: torch.Generator | None = None, settings: Any = None
    ) -> Randomness:
        """Draw the numbers for a step, or none where all steps are without noise."""
        if settings is None or bool(settings.noise.any()):
            return super().randomness(position, generator, settings)
        none = position.new_zeros(())
        return Randomness(none.expand(1, *position.shape), none.expand(0, len(position)))

    def step(
        self, potential: Potential, state: State, settings: Settings, random: Randomness
    ) -> tuple[State, Transition]:
        """Return chains after one step, at whose ends the next batches have been met."""
        (position, _, gradient), velocity = state
        rate = settings.step_size
        norm = gradient.norm(dim=-1) / self.points
        move = rate if self.clip_norm is None else rate * (self.clip_norm / norm).clamp(max=1)
        spread = (2 * self.friction * rate).sqrt() * settings.noise
        after = (1 - self.friction) * velocity if self.friction < 1 else torch.zeros_like(velocity)
        after = after.addcmul_(gradient, -move[:, None])
        after = after.addcmul_(random.noise[0], spread[:, None])
        point = Point.at(potential, position + after)
        statistics = torch.stack([rate * self.points, norm], -1)
        done = torch.ones_like(rate, dtype=torch.bool)
        return State(point, after), Transition(done, point.position, point.potential, statistics)

    def plan(self, length: Length) -> Tensor:
        """Return the factor of the rate and whether there is noise, for the steps that follow."""
        steps = torch.arange(1, length.total + 1, dtype=torch.double, device="cpu")
        if self.schedule == "cyclical":
            share = (steps * self.num_cycles / length.total) % 1  # of its cycle, before each
            has_noise = (share >= self.exploration).to(share)
            return torch.stack([0.5 * (math.pi * share).cos() + 0.5, has_noise], -1)
        factor = one = torch.ones_like(steps)
        if self.schedule == "polynomial":
            factor = (1 + steps / self.offset) ** -self.power
        return torch.stack([factor, one], -1)

    def adapt(
        self,
        before: Chains,
        state: State,
        transition: Transition,
        warm: Tensor,
        rows: Tensor,
        random: Randomness,
    ) -> Chains:
        factor, noise = rows.to(transition.potential).unbind(-1)
        rate = self.lr / self.points * factor
        return Chains(state, before.settings._replace(step_size=rate, noise=noise), ())

    def default_warmup(self, num_samples: int, thinning: int) -> int:
        """Return the default warm-up; for cycles, the shortest possible."""
        if self.schedule != "cyclical":
            return super().default_warmup(num_samples, thinning)
        return self._shortest(Length(0, num_samples, thinning)) - num_samples * thinning

    def _shortest(self, length: Length) -> int:
        """Return the number of transitions of the shortest run in cycles that has its samples."""
        each = -(-length.num_samples // self.num_cycles)
        # One more, since ends of cycles are rounded.
        steps = (each * length.thinning + 1) / (1 - self.exploration)
        return self.num_cycles * math.ceil(round(steps, 6))

    def kept(self, length: Length) -> Tensor:
        """Return the counts of the kept transitions: for cycles, the last ones of each."""
        if self.schedule != "cyclical":
            return super().kept(length)
        shortest = self._shortest(length)
        hint = (
            f" for {self.num_cycles} cycles, of which the last {1 - self.exploration:.0%} give "
            f"{length.num_samples} samples with thinning={length.thinning}: pass warmup_steps="
            f"{shortest - length.total + length.num_warmup} or more, or fewer cycles"
        )
        check.count("the number of steps", length.total, shortest, hint)
        found = []
        for cycle in range(self.num_cycles):
            end = (cycle + 1) * length.total // self.num_cycles
            # The last cycles have one more, where they cannot have as many.
            count = (length.num_samples + cycle) // self.num_cycles
            found += [end - length.thinning * back for back in reversed(range(count))]
        return torch.tensor(found, device="cpu")

    def stops(self, transition: Transition, settings: Any, kept: Tensor) -> tuple[str, int] | None:
        """Return an error if a chain is not finite, or `LEFT` above its start.

        Heights above a potential `U` are in units of `|U| + N / T + d` nats. A chain at rest is
        `d / 2` nats above its mode, and an outlier of a hundred scales, in a batch of one, 5e3
        units; one that diverges grows exponentially. Samples at the end are left out up to one that
        is at most `SENSIBLE` above the lowest of them and the start.
        """
        start, least_unit = settings.start, self.points + transition.position.shape[-1]
        fine = transition.potential - start <= LEFT * (start.abs() + least_unit)
        fine &= transition.statistics.isfinite().all(-1)
        if bool(fine.all()):
            return None
        least = torch.cat([start[:, None], kept], 1).amin(1, keepdim=True)
        good = (kept - least <= SENSIBLE * (least.abs() + least_unit)).all(0).nonzero()
        lr, norm = transition.statistics[int((~fine).nonzero()[0])].tolist()
        return (
            f"{type(self).__name__} diverged at the rate {lr:.3g}, where the gradient's norm was "
            f"{norm:.3g}: lower lr={self.lr:g}, or pass clip_norm=1.0"
        ), int(good[-1]) + 1 if len(good) else 0

    def progress(self, statistics: dict[str, Tensor]) -> dict[str, float]:
        """Return numbers for a progress bar: the last rate, and the mean norm of gradients."""
        rates, norms = (statistics[name] for name in self.statistics)
        return {"lr": float(rates[-1]), "gradient": float(norms.mean())}


@dataclass(frozen=True)
class SGHMC(SGLD):
    r"""Stochastic-gradient Hamiltonian Monte Carlo, a kernel of `MCMC_BNN`.

    SGD with momentum `1 - a` and noise: `v <- (1 - a) v - eta grad U + sqrt(2 a eta) z`, and
    `w <- w + v`. Arguments and errors that are not listed are those of `SGLD`.

    Args:
        friction: `a`, in (0, 1).

    Reference:
        Chen, Fox, Guestrin 2014, eq. 15.

    Example:
        >>> import functools, tyxe
        >>> kernel = functools.partial(tyxe.samplers.SGHMC, lr=0.1, schedule="cyclical")
        >>> kernel().friction
        0.1
    """

    friction: float = check.field(0.1, check.number, above=0, below=1)
